"""Small runs in processes of their own, and what two of them must have in common."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from torchtrain.checkpoint.manifest import MANIFEST, Manifest
from torchtrain.tests.forks import Forks
from torchtrain.tests.tiny import tiny_settings

STEPS = 6


TIME_LIMIT = 900  # seconds in which a process ends on any machine, however busy: only one that hangs takes longer


class Place:
    """A folder with a config; runs in it are the same but for their name. `forks` runs them; None: somebody else."""

    def __init__(self, folder: Path, forks: Forks | None, tree: dict[str, Any]) -> None:
        self.folder, self.forks, self.tree = folder, forks, tree
        self.seconds = 0.0  # of the last run
        self.config = folder / "config.yaml"
        self.config.write_text(yaml.safe_dump(tree), encoding="utf-8")

    def train(self, name: str, *overrides: str, **kill: Any) -> Any:
        return self._run("train", str(self.config), f"run.folder={self.folder / name}", *overrides, name=name, **kill)

    def resume(self, name: str, *arguments: str, **kill: Any) -> Any:
        return self._run("resume", str(self.folder / name), *arguments, name=name, **kill)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(encoding="utf-8")

    def last_line(self, name: str) -> str:
        return self.log(name).splitlines()[-1]

    def _run(self, *argv: str, name: str, **kill: Any) -> Any:
        assert self.forks is not None
        answer = self.forks.run(*argv, log=self.folder / f"{name}.log", **kill)
        codes, self.seconds = answer["codes"], max(answer["seconds"])
        return codes if len(codes) > 1 else codes[0]


def make_place(folder: Path, forks: Forks | None, model: Path, corpus: Path, /, **changes: dict[str, Any]) -> Place:
    """A config of six steps that saves every other and keeps three models; `changes` by section."""
    tree = tiny_settings(folder, model, corpus)
    tree["model"]["dtype"], tree["pack"]["variant"] = "bfloat16", "anchor+interleave"
    tree["train"] = {"steps": STEPS, "sequences_per_step": 2, "learning_rate": 0.02, "schedule": "cosine"}
    tree["save"] = {"every": 2, "keep": 2, "last": 3}
    return Place(folder, forks, {name: section | changes.get(name, {}) for name, section in tree.items()})


@contextmanager
def unprivileged() -> Iterator[None]:
    """As root, be nobody for a while: root may write into read-only folders."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def flip(path: Path, at: int | None = None) -> None:
    """Change one bit of a byte, default: in the middle, of a file, which may be linked elsewhere."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if at is None else at] ^= 1
    path.unlink()
    path.write_bytes(content)


def content(run: Path) -> dict[str, Any]:
    """All that a run leaves and that does not say how long it took, where it lies, or whether training waited for its
    saves.
    """
    found: dict[str, Any] = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if path.is_file() and name not in ("timing.jsonl", "run.json", "config.yaml"):
            found[name] = path.read_bytes()
            if path.name == MANIFEST:
                manifest = Manifest.read(path.parent).model_dump()
                del manifest["config"]["run"]["folder"], manifest["config"]["save"]["asynchronous"]
                found[name] = manifest
    return found


def assert_same(run: Path, straight: Path, but: tuple[str, ...] = ()) -> None:
    """Two runs left the same bits, `but` for what lies in these folders."""
    mine, theirs = (
        {name: what for name, what in content(folder).items() if not name.startswith(but)} for folder in (run, straight)
    )
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if mine[name] != theirs[name]]
    assert different == []


def tree_of(folder: Path) -> dict[str, bytes | str]:
    """All that a folder holds: content of files, where links lead, and "" for an empty folder."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
        elif path.is_dir() and not any(path.iterdir()):
            found[str(path.relative_to(folder))] = ""
    return found
