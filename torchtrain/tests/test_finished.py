"""When a run is finished, and what it leaves then."""

import json
import os
import signal
import stat

import pytest

from anchorline.errors import UserError
from anchorline.files import entries_of
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.tests.run_fixtures import QUIET
from torchtrain.tests.runs import assert_same, tree_of


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
