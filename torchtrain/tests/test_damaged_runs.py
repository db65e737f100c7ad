"""A damaged file of a run is one line that names it, whatever it holds."""

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from anchorline.errors import UserError
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.status import status_lines
from torchtrain.tests.run_fixtures import QUIET, resume
from torchtrain.tests.runs import unprivileged

DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[1]\n",
    "no json": b"{\n",
    "binary": bytes(range(256)) * 4,
    "an object": b'{"event": "step", "step": "x", "loss": null}\n',
    "another object": b'{"made_by": "torchtrain train", "event": "evaluation", "step": 1e400, "loss": "0"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "digits": b'{"event": "step", "step": ' + b"9" * 5000 + b"}\n",
}
DAMAGED = [
    "run.json",
    "config.yaml",
    "outputs.json",
    "metrics.jsonl",
    "timing.jsonl",
    "bad_steps/step-00000003.json",
    "checkpoints/step-00000004/manifest.json",
    "checkpoints/step-00000004/rng-00000.safetensors",
    "checkpoints/step-00000004/state-00000-000.safetensors",
]


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_line_that_names_it(stopped, tmp_path, name, monkeypatch):
    """Whatever it holds, what it is, and whoever may read it: never a traceback, never a wait."""
    monkeypatch.setattr(recipe, "set_up", lambda *_: pytest.fail("a damaged run is not gone on with"))
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = run / name
    path.parent.mkdir(exist_ok=True)
    was = path.read_bytes() if path.exists() else b'{"step": 3}'
    deeds = {name: (lambda content=content: path.write_bytes(content)) for name, content in DAMAGE.items()}
    deeds |= {
        "a pipe": lambda: os.mkfifo(path),
        "a folder": path.mkdir,
        "a link to nothing": lambda: path.symlink_to(run / "nothing"),
        "a device": lambda: path.symlink_to("/dev/zero"),
    }
    for deed in deeds.values():
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        deed()
        told = []
        for verb in (lambda: list(status_lines(run)), lambda: resume(run)):
            try:
                told += verb() or []
            except UserError as error:
                told.append(str(error))
            except pytest.fail.Exception:  # it went on
                told.append(f"{path} does not matter")
        assert not [line for line in told if "\n" in line]
        if name != "config.yaml":
            assert any("holds no run;" in line or path.name in line or "step 4, damaged" in line for line in told), told
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(was)
    with pytest.raises(pytest.fail.Exception):
        resume(run)


@pytest.mark.parametrize("name", [".", "run.json", "outputs.json", "timing.jsonl", "checkpoints"])
def test_what_may_not_be_read_is_one_line(stopped, name, monkeypatch):
    monkeypatch.setattr(recipe, "set_up", lambda *_: pytest.fail("it went on"))
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is its user's alone
        Path(folder).chmod(0o755)
        run = Path(shutil.copytree(stopped, Path(folder) / "run"))
        (run / "bad_steps").mkdir()
        (run / "bad_steps" / "step-00000003.json").write_text('{"step": 3}')
        for path in [run, *run.rglob("*")]:
            os.chown(path, 65534, 65534)
        config, mode = load_config(run / "config.yaml", [f"run.folder={run}"]), (run / name).stat().st_mode
        (run / name).chmod(0)
        with unprivileged():
            for verb in (lambda: list(status_lines(run)), lambda: recipe.resume(config, console=QUIET)):
                with suppress(UserError, pytest.fail.Exception):
                    verb()
        (run / name).chmod(mode)
