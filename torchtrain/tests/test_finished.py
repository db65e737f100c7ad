"""When a run is finished, and what it leaves then."""

import json
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest

from anchorline.errors import UserError
from anchorline.files import entries_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.status import status_lines
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import QUIET, resume
from torchtrain.tests.runs import assert_same, tree_of


@pytest.mark.parametrize("what", ["cut off", "changed", "missing"])
def test_a_model_that_is_not_what_was_exported_is_named(done, straight, what):
    """It is exported again once the user has moved it."""
    path = done / "model" / "model.safetensors"
    content = path.read_bytes()
    if what == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-100] if what == "cut off" else content[:-1] + bytes([content[-1] ^ 1]))
    before = tree_of(done / "model")
    assert next(status_lines(done)).endswith(": finished" if what == "changed" else ": interrupted")
    with pytest.raises(UserError, match=rf"{path}: .*; move {done}/model elsewhere, then: torchtrain resume {done}"):
        resume(done)
    assert tree_of(done / "model") == before
    (done / "model").rename(done.parent / "elsewhere")
    assert resume(done) is not None
    assert_same(done, straight)


def test_outputs_list_what_was_exported(straight):
    outputs = json.loads((straight / "outputs.json").read_text())
    assert outputs["finished"] == 6
    assert set(outputs["models"]) == {"model", "exports/step-00000002", "exports/step-00000004"}
    for name, listed in outputs["models"].items():
        assert listed == {file: entry.model_dump() for file, entry in entries_of(straight / name).items()}


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_all_that_a_run_leaves_follows_the_umask(fresh, umask):
    train, here = fresh
    before = os.umask(umask)
    try:
        train(here / "run")
    finally:
        os.umask(before)
    files_and_folders = list((here / "run").rglob("*"))
    assert (here / "run" / "model" / "model.safetensors") in files_and_folders
    for path in [here / "run", *files_and_folders]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o777 if path.is_dir() else 0o666) & ~umask, path


# --- what resume removes, and what it refuses to remove ---------------------------------------------------------------


def test_resume_refuses_a_run_whose_checkpoints_are_gone(stopped, straight, tmp_path):
    """Their disk may not be mounted. `--step 0` begins anew."""
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    before = tree_of(run)
    with pytest.raises(UserError, match=rf"{run}/checkpoints: .*one of step 4; .*: torchtrain resume {run} --step 0"):
        resume(run)
    assert tree_of(run) == before
    (bad,) = [finding for finding in verify_folder(run) if not finding.good]
    assert (bad.what, bad.said) == ("checkpoints", "are gone, and there was one of step 4")
    recipe.resume(load_config(run / "config.yaml", [f"run.folder={run}"]), step=0, console=QUIET)
    assert_same(run, straight)


@pytest.mark.parametrize("name", ["model/notes.txt", "exports/step-00000004/notes.txt"])
def test_an_earlier_step_removes_later_models_but_not_a_users_file(done, straight, name):
    (done / name).write_text("the user's")
    before = tree_of(done)
    config = load_config(done / "config.yaml", [f"run.folder={done}"])
    with pytest.raises(UserError, match=rf"{done}/{name}: was not written by the run"):
        recipe.resume(config, step=0 if name.startswith("exports") else 4, console=QUIET)
    assert tree_of(done) == before
    (done / name).unlink()
    recipe.resume(config, step=0 if name.startswith("exports") else 4, console=QUIET)
    assert_same(done, straight)


def test_checkpoints_are_retained_after_an_interruption(place, straight):
    """Killed between the last commit and what follows it, no checkpoint too many stays."""
    assert place.train("retained", at="committed", nth=3) == -signal.SIGKILL
    folder = place.folder / "retained"
    assert Checkpoints(folder / "checkpoints").steps() == [2, 4, 6]
    for left in (
        "model.partial",
        "model.deleted",
        "exports/step-00000004.deleted",
        "checkpoints/step-00000002.deleted",
    ):
        (folder / left).mkdir()
    assert place.resume("retained") == 0
    assert_same(folder, straight)
    assert not [*folder.glob("**/*.partial"), *folder.glob("**/*.deleted")]
