"""What `--replace` removes: what the run's own record lists, and nothing of a user's."""

import json
import os
import shutil
import signal

import pytest

from anchorline.errors import UserError
from anchorline.files import remove
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.status import status_lines
from torchtrain.tests.run_fixtures import QUIET, as_before_there_was_a_list
from torchtrain.tests.runs import assert_same, content, tree_of, unprivileged

USERS = [
    "model/README.md",
    "model/config.json",
    "checkpoints/notes.txt",
    "checkpoints/step-00000004/notes.txt",
    "checkpoints/best/state-00000-000.safetensors",
    "checkpoints/mine.partial",
    "exports/mine.deleted/model.safetensors",
    "exports/step-abcdefgh/model.safetensors",
    "model.partial/model.safetensors",
    "model.deleted/config.json",
    "bad_steps/why.txt",
    "tensorboard/events.txt",
    "wandb/run-1/file",
    "figures/a.png",
]


@pytest.mark.parametrize("name", USERS)
def test_replace_refuses_what_the_record_does_not_list(fresh, done, name):
    train, _ = fresh
    path = done / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("the user's")
    before = tree_of(done)
    with pytest.raises(
        UserError, match=rf"run.folder {done}: holds {name}, which is not recognised as the run's; move"
    ):
        train(done, replace=True)
    assert tree_of(done) == before


def test_replace_refuses_links_and_pipes(fresh, done):
    train, here = fresh
    shutil.move(done / "checkpoints", here / "disk")
    (done / "checkpoints").symlink_to(here / "disk")
    with pytest.raises(UserError, match="holds checkpoints, which is not recognised"):
        train(done, replace=True)
    (done / "checkpoints").unlink()
    os.mkfifo(done / "loss.png.partial")
    with pytest.raises(UserError, match=r"holds loss.png.partial, which is not recognised"):
        train(done, replace=True)
    (done / "loss.png.partial").unlink()
    train(done, replace=True)
    assert Checkpoints(here / "disk").steps() == [4, 6], "nothing behind a link is ours"
    assert Checkpoints(done / "checkpoints").steps() == [2]


def test_replace_refuses_to_remove_what_the_run_is_made_of(fresh, done, place):
    train, here = fresh
    before = tree_of(done)
    with pytest.raises(UserError, match=rf"model.source: {done}/model stands in run.folder {done}; move it elsewhere"):
        train(done, f"model.source={done}/model", replace=True)
    (here / "way").symlink_to(done)
    with pytest.raises(UserError, match=rf"model.source: {here}/way/model stands in run.folder {done}"):
        train(done, f"model.source={here}/way/model", replace=True)
    (done / "bad_steps").mkdir()
    shutil.copy(place.folder / "documents.jsonl", done / "bad_steps" / "step-00000001.json")
    (here / "documents.jsonl").symlink_to(done / "bad_steps" / "step-00000001.json")
    with pytest.raises(UserError, match=rf"data.sources.0.files: {here}/documents.jsonl stands in run.folder {done}"):
        train(done, f"data.sources.0.files={here}/*.jsonl", replace=True)
    shutil.rmtree(done / "bad_steps")
    assert tree_of(done) == before


def test_what_a_run_is_made_of_stays_behind_links_and_after_a_removal_that_was_cut_short(fresh, done):
    """A hub's cache holds links to files; and what --replace began to remove goes without it, too."""
    train, here = fresh
    (here / "cached").mkdir()
    for path in (done / "model").iterdir():
        (here / "cached" / path.name).symlink_to(path)
    with pytest.raises(UserError, match=rf"model.source: {here}/cached/.* stands in run.folder {done}"):
        train(done, f"model.source={here}/cached", "rope.theta=60000.0", replace=True)
    (done / "run.json").rename(done / "run.json.deleted")
    before = tree_of(done)
    with pytest.raises(UserError, match=rf"model.source: {done}/model stands in run.folder {done}"):
        train(done, f"model.source={done}/model", "rope.theta=60000.0")
    assert tree_of(done) == before


def test_a_folder_that_may_not_be_removed_takes_a_run(fresh, tmp_path):
    """A disk of its own, or one that somebody made for us where we may not write."""
    kept = tmp_path / "theirs" / "ours"
    kept.mkdir(parents=True)
    os.chown(kept, 65534, 65534)
    kept.chmod(0o777)
    (tmp_path / "theirs").chmod(0o555)
    (kept / "x").touch()
    for place in (tmp_path, *tmp_path.parents[:3]):
        if place.stat().st_uid == os.geteuid():
            place.chmod(place.stat().st_mode | 0o055)
    with unprivileged():
        assert not remove(kept, ["x"])
    assert [*kept.iterdir()] == []
    (tmp_path / "theirs").chmod(0o755)


def test_replace_checks_again_at_the_moment_it_removes(fresh, done, monkeypatch):
    """While the model loads, a user lays something into the folder."""
    train, _ = fresh
    real = recipe.set_up

    def set_up(*arguments):
        made = real(*arguments)
        (done / "model" / "README.md").write_text("the user's")
        return made

    monkeypatch.setattr(recipe, "set_up", set_up)
    before = content(done)
    with pytest.raises(UserError, match=r"holds model/README.md, which is not recognised as the run's"):
        train(done, replace=True)
    (done / "model" / "README.md").unlink()
    assert content(done) == before


def test_a_run_that_came_in_the_meantime_is_not_replaced(fresh, done, monkeypatch):
    """Without --replace, too: the folder was empty when it was checked."""
    train, here = fresh
    shutil.move(done, here / "other")
    real = recipe.set_up

    def set_up(*arguments):
        made = real(*arguments)
        shutil.copytree(here / "other", done)
        return made

    monkeypatch.setattr(recipe, "set_up", set_up)
    with pytest.raises(UserError, match=r"already holds a run; choose another"):
        train(done)
    assert tree_of(done) == tree_of(here / "other")


def test_a_run_is_replaced_whole(place, straight):
    """Killed in between, it leaves no half of the old one that counts as a run; `train` goes on from there."""
    folder = place.folder / "replaced"
    shutil.copytree(straight, folder)
    assert place.train("replaced", "--replace", at="replacement") == -signal.SIGKILL
    assert not (folder / "run.json").exists()
    assert place.resume("replaced") == 2
    assert "holds no run of ours" in place.last_line("replaced")
    with pytest.raises(UserError, match="holds what is left of a run that --replace was removing; train anew"):
        list(status_lines(folder))
    assert place.train("replaced") == 0, place.log("replaced")
    assert_same(folder, straight)
    assert not [path.name for path in folder.parent.glob("replaced*") if path.name not in ("replaced", "replaced.log")]


def test_a_run_of_before_there_was_a_list(fresh, done):
    """It is finished, and replaced unless something lies in it that transformers does not write."""
    train, _ = fresh
    as_before_there_was_a_list(done)
    assert next(status_lines(done)).endswith(": finished")
    assert recipe.resume(load_config(done / "config.yaml", [f"run.folder={done}"]), console=QUIET) is None
    (done / "model" / "README.md").write_text("the user's")
    with pytest.raises(UserError, match=r"holds model/README.md, which is not recognised"):
        train(done, replace=True)
    (done / "model" / "README.md").unlink()
    train(done, replace=True)
    assert json.loads((done / "run.json").read_text())["format"] == 2


def test_files_are_removed_by_name_and_nothing_behind_links(tmp_path):
    (tmp_path / "folder" / "in").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for name in ("folder/a", "folder/in/b", "folder/in/c", "elsewhere/d"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "elsewhere")
    assert not remove(tmp_path / "folder", ["a", "in/b", "link/d", "gone", "../elsewhere/d"])
    assert set(tree_of(tmp_path)) == {"folder/in/c", "folder/link", "elsewhere/d"}
    assert not remove(tmp_path / "folder" / "link", ["d"])
    (tmp_path / "folder" / "link").unlink()
    assert remove(tmp_path / "folder", ["in/c"])
    assert set(tree_of(tmp_path)) == {"elsewhere/d"}
