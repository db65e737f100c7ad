"""A damaged run: whatever is damaged, and however, is one line that names it, and what the line offers works."""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from anchorline.errors import UserError
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config, load_config
from torchtrain.run import recipe
from torchtrain.run.folder import RunFolder
from torchtrain.run.status import status_lines
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import QUIET, resume
from torchtrain.tests.runs import assert_same, flip, tree_of, unprivileged


def cut(path: Path, end: int = -1) -> None:
    path.write_bytes(path.read_bytes()[:end])


def saved_metrics(path: Path, step: int) -> int:
    """Return how many bytes of metrics.jsonl a checkpoint goes on from."""
    return Manifest.read(Checkpoints(path.parent / "checkpoints").path(step)).progress.metrics.bytes


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


LAST, STATE, RNG = "checkpoints/step-00000004", "state-00000-000.safetensors", "rng-00000.safetensors"
MANIFEST, METRICS = "manifest.json", "metrics.jsonl"
# Of a run with checkpoints of steps 2 and 4: what is damaged and how, what resume says, and the step that it offers.
DAMAGED: list[tuple[str, Callable[[Path], object], str, int]] = [
    (f"{LAST}/{STATE}", flip, r"its content has changed \(its SHA-256 is not the one written down\)", 2),
    *((f"{LAST}/{STATE}", deed, "", 2) for deed in (cut, Path.unlink)),
    *((f"{LAST}/{name}", deed, "", 2) for name in (RNG, MANIFEST) for deed in (flip, cut, Path.unlink)),
    (METRICS, lambda path: flip(path, saved_metrics(path, 4) - 5), "has been changed", 2),
    (METRICS, lambda path: cut(path, saved_metrics(path, 4) - 5), "has been changed", 2),
    (METRICS, lambda path: flip(path, saved_metrics(path, 2) // 2), "has been changed", 0),
    (METRICS, Path.unlink, "has been changed", 0),
    ("checkpoints", empty, "there was one of step 4", 0),  # their disk may not be mounted
]
FOLLOWED = (0, *range(9, len(DAMAGED)))  # one of each kind: the checkpoint, the events, the folder


@pytest.mark.parametrize("number", range(len(DAMAGED)))
def test_a_damaged_file_is_named_and_the_step_that_is_offered_works(stopped, straight, tmp_path, number):
    name, damage, told, offered = DAMAGED[number]
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    damage(run / name)
    before = tree_of(run)
    with pytest.raises(UserError, match=rf"^{run / name}: .*{told}.*: torchtrain resume {run} --step {offered}$"):
        resume(run)
    assert tree_of(run) == before
    assert [finding for finding in verify_folder(run) if not finding.good and "base" not in finding.what]
    if number in FOLLOWED:
        config = load_config(run / "config.yaml", [f"run.folder={run}"])
        assert recipe.resume(config, step=offered, console=QUIET) is not None
        assert_same(run, straight)


def test_where_no_checkpoint_is_good_the_beginning_is_offered(stopped, tmp_path):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    for step in ("step-00000002", "step-00000004"):
        flip(run / "checkpoints" / step / STATE)
    with pytest.raises(UserError, match=rf"there is no good one: torchtrain resume {run} --step 0$"):
        resume(run)
    with pytest.raises(UserError, match=r"has no checkpoint of step 7; there are those of 2, 4$"):
        recipe.resume(load_config(run / "config.yaml", [f"run.folder={run}"]), step=7, console=QUIET)


@pytest.mark.parametrize("damage", [lambda path: cut(path, -100), flip, Path.unlink])
def test_a_model_that_is_not_what_was_exported_is_named(done, straight, damage):
    """It is exported again once the user has moved it."""
    damage(done / "model" / "model.safetensors")
    before = tree_of(done / "model")
    assert next(status_lines(done)).endswith(": finished" if damage is flip else ": interrupted")
    told = rf"{done}/model/model.safetensors: .*; move {done}/model elsewhere, then: torchtrain resume {done}"
    with pytest.raises(UserError, match=told):
        resume(done)
    assert tree_of(done / "model") == before
    (done / "model").rename(done.parent / "elsewhere")
    assert resume(done) is not None
    assert_same(done, straight)


@pytest.mark.parametrize("was", [b"train:", b"learning_rate: 0.02", b"steps: 6", b"run:"])
def test_a_damaged_config_says_where_the_config_stands_besides(stopped, tmp_path, was):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    whole, path = load_config(run / "config.yaml"), run / "config.yaml"
    assert was in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(was, bytes([was[0] ^ 1]) + was[1:-1] + b"\x01"))
    with pytest.raises(UserError, match=r"; the config with which the run began stands in .*run\.json and in manifest"):
        RunFolder(run).read_config()
    for place in (run / "run.json", run / LAST / MANIFEST):
        assert Config.model_validate(json.loads(place.read_text())["config"]) == whole


# --- whatever a file holds, whatever it is, and whoever may read it ---------------------------------------------------

CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "a list": b"[1]\n",
    "no json": b"{\n",
    "binary": bytes(range(256)) * 4,
    "an object": b'{"event": "step", "step": "x", "loss": null}\n',
    "another object": b'{"made_by": "torchtrain train", "event": "evaluation", "step": 1e400, "loss": "0"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "digits": b'{"event": "step", "step": ' + b"9" * 5000 + b"}\n",
}
FREE = ["outputs.json", "timing.jsonl", "bad_steps/step-00000003.json"]  # some contents of which stop nothing
FILES = ["run.json", "config.yaml", METRICS, *(f"{LAST}/{name}" for name in (MANIFEST, RNG, STATE)), *FREE]
WENT_ON = "model.source '/nowhere': "


def told_by(run: Path) -> list[str]:
    """Return what `status` prints and why `resume` ends; it always does, because the run's model is gone."""
    told = []
    for verb in (
        lambda: list(status_lines(run)),
        lambda: recipe.resume(
            load_config(run / "config.yaml", [f"run.folder={run}", "model.source=/nowhere"]), console=QUIET
        ),
    ):
        try:
            told += verb() or []
        except UserError as error:
            told.append(str(error))
    assert not [line for line in told if "\n" in line]
    return told


@pytest.mark.parametrize("name", FILES)
def test_what_a_file_holds_or_is_gives_one_line_that_names_it(stopped, tmp_path, name):
    """Never a traceback, never a wait."""
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    path = run / name
    path.parent.mkdir(exist_ok=True)
    was = path.read_bytes() if path.exists() else b'{"step": 3}'
    deeds = [lambda content=content: path.write_bytes(content) for content in CONTENTS.values()]
    deeds += [lambda: os.mkfifo(path), path.mkdir, *(lambda to=to: path.symlink_to(to) for to in ("nil", "/dev/zero"))]
    deeds.append(lambda: path.write_bytes(was))
    for deed in deeds:
        if path.is_dir():
            path.rmdir()
        path.unlink(missing_ok=True)
        deed()
        told = told_by(run)
        named = [line for line in told if "holds no run;" in line or path.name in line or "step 4, damaged" in line]
        assert named or (name in FREE and told[-1].startswith(WENT_ON)) or deed is deeds[-1], told
    assert told[-1].startswith(WENT_ON), "it is whole again"


@pytest.mark.parametrize("name", [".", "run.json", "outputs.json", "timing.jsonl", "checkpoints"])
def test_what_may_not_be_read_is_one_line(stopped, name):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is its user's alone
        Path(folder).chmod(0o755)
        run = Path(shutil.copytree(stopped, Path(folder) / "run"))
        for path in [run, *run.rglob("*")] if os.geteuid() == 0 else []:
            os.chown(path, 65534, 65534)
        mode = (run / name).stat().st_mode
        (run / name).chmod(0)
        with unprivileged():
            told = told_by(run)
        (run / name).chmod(mode)
        denied = re.search("ermission denied", "\n".join(told)) is not None
        assert denied or (name in FREE and told[-1].startswith(WENT_ON)), told
