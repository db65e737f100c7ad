"""What resume takes away, and what it leaves: a user's files, and what it cannot see."""

import os
import shutil
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest

from anchorline.errors import UserError
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.folder import RunFolder
from torchtrain.run.status import status_lines
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import QUIET, resume
from torchtrain.tests.runs import assert_same, content, tree_of


@pytest.mark.parametrize("how", ["a link to nothing", "an empty folder", "nothing", "a file"])
def test_resume_refuses_checkpoints_that_are_out_of_reach(place, done, straight, how):
    """Their disk is not mounted: to begin anew would destroy what there is."""
    shutil.move(done / "model", done.parent / "served")
    shutil.move(done / "checkpoints", done.parent / "disk")
    if how == "a link to nothing":
        (done / "checkpoints").symlink_to(done.parent / "not-mounted")
    elif how == "an empty folder":
        (done / "checkpoints").mkdir()
    elif how == "a file":
        (done / "checkpoints").write_text("")
    before = tree_of(done)
    config = load_config(done / "config.yaml", [f"run.folder={done}"])
    with pytest.raises(UserError, match=rf"{done}/checkpoints: .*begin anew: torchtrain resume {done} --step 0"):
        recipe.resume(config, console=QUIET)
    assert tree_of(done) == before
    recipe.resume(config, step=0, console=QUIET)
    assert_same_but(done, straight, "checkpoints.deleted")


def test_resume_refuses_an_empty_folder_where_checkpoints_were(stopped, tmp_path):
    """What a disk that is not mounted looks like."""
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    before = tree_of(run)
    with pytest.raises(UserError, match=r"checkpoints are gone, and there was one of step 4"):
        resume(run)
    assert tree_of(run) == before


@pytest.mark.parametrize("how", ["a line", "a pipe"])
def test_resume_says_the_way_out_where_timings_are_damaged(stopped, straight, tmp_path, how):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    if how == "a line":
        with (run / "timing.jsonl").open("a") as file:
            file.write("{}\n")
    else:
        (run / "timing.jsonl").unlink()
        os.mkfifo(run / "timing.jsonl")
    before = tree_of(run)
    fault = r"line \d+ is damaged: it has no name of an event" if how == "a line" else "not a regular file"
    with pytest.raises(UserError, match=rf"{run}/timing.jsonl: {fault}; .* torchtrain resume {run} --step 0"):
        resume(run)
    assert tree_of(run) == before


def test_verify_sees_what_is_gone(done):
    shutil.rmtree(done / "checkpoints")
    (done / "checkpoints").mkdir()
    (done / "outputs.json").unlink()
    told = {found.what: found.said for found in verify_folder(done) if not found.good}
    assert told["checkpoints"] == "are gone, and there was one of step 6"
    assert "lists no model" in told["outputs.json"]


def test_status_tells_the_rest_of_a_damaged_run(done):
    with (done / "timing.jsonl").open("a") as file:
        file.write("null\n3\n[]\n")
    lines = list(status_lines(done))
    assert [line for line in lines if line.startswith("damaged") and "timing.jsonl: line" in line]
    assert [line for line in lines if line.startswith("checkpoint step 6")]
    assert [line for line in lines if line == f"model      {done}/model"]


def test_an_export_whose_removal_was_cut_short_goes(done, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("torchtrain.run.folder.shutil.rmtree", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            RunFolder(done).remove_later_exports(2, 6)
    left = [path.name for path in done.glob("**/*.deleted")]
    assert len(left) == 1
    RunFolder(done).sweep()
    assert '"removing": null' in (done / "outputs.json").read_text()
    assert not list(done.glob("**/*.deleted"))


def assert_same_but(run: Path, straight: Path, name: str) -> None:
    mine, theirs = content(run), content(straight)
    assert {of: was for of, was in mine.items() if of != name} == theirs


@pytest.mark.parametrize("name", ["model/README.md", "exports/step-00000004/README.md"])
def test_an_earlier_step_does_not_take_what_a_user_laid_into_a_model(done, name):
    (done / name).write_text("the user's")
    before = tree_of(done)
    shutil.rmtree(done / "checkpoints" / "step-00000006")
    config = load_config(done / "config.yaml", [f"run.folder={done}"])
    step = 0 if name.startswith("exports") else 4
    with pytest.raises(UserError, match=rf"{done}/{name}: is not recognised as the run's"):
        recipe.resume(config, step=step, console=QUIET)
    assert {of: was for of, was in before.items() if "step-00000006" not in of or "checkpoints" not in of} == tree_of(
        done
    )


def test_checkpoints_are_retained_after_an_interruption(place, straight):
    """Killed between the last commit and what follows it, no checkpoint too many stays."""
    assert place.train("retained", at="committed", nth=3) == -signal.SIGKILL
    folder = place.folder / "retained"
    assert Checkpoints(folder / "checkpoints").steps() == [2, 4, 6]
    assert place.resume("retained") == 0
    assert_same(folder, straight)


def test_a_users_file_in_a_checkpoint_outlives_it(interrupted, place):
    folder = place.folder / interrupted
    notes = folder / "checkpoints" / "step-00000002" / "notes.txt"
    notes.write_text("the user's")
    mine = folder / "checkpoints" / "mine.partial"
    mine.write_text("the user's")
    assert place.resume(interrupted) == 0
    assert Checkpoints(folder / "checkpoints").steps() == [4, 6]
    assert [path.read_text() for path in folder.rglob("notes.txt")] == ["the user's"]
    assert mine.read_text() == "the user's"
