"""`--replace` moves the old run aside."""

import os
import shutil
import signal

import pytest
from rich.console import Console

from anchorline.errors import UserError
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.lock import hold
from torchtrain.run.status import status_lines
from torchtrain.tests.runs import assert_same, tree_of


def test_replace_keeps_the_old_run_with_all_it_holds(fresh, done):
    train, here = fresh
    (done / "notes.txt").write_text("the user's")
    before = tree_of(done)
    train(done, replace=True)
    assert tree_of(here / "run.replaced-1") == before
    assert not (done / "notes.txt").exists()
    assert next(status_lines(done)).endswith("finished")
    train(done, replace=True)
    assert sorted(path.name for path in here.iterdir()) == ["run", "run.replaced-1", "run.replaced-2"]


def test_only_a_run_that_nobody_works_on_is_replaced(fresh, done, tmp_path):
    train, here = fresh
    before = tree_of(done)
    with hold(done / ".lock"), pytest.raises(UserError, match="another process is at work in it"):
        train(done, replace=True)
    (here / "data").mkdir()
    (here / "data" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match="holds files and is not recognised as a run"):
        train(here / "data", replace=True)
    assert tree_of(done) == before
    assert sorted(path.name for path in here.iterdir()) == ["data", "run"]


@pytest.mark.parametrize("field", ["model.source", "data.cache", "data.sources.0.files"])
def test_a_run_does_not_read_from_the_run_that_it_replaces(fresh, done, field):
    train, _ = fresh
    before = tree_of(done)
    with pytest.raises(UserError, match=rf"{field}: {done}/model lies in run.folder {done}; choose a folder outside"):
        train(done, f"{field}={done}/model", replace=True)
    assert tree_of(done) == before


def test_a_run_that_came_in_the_meantime_is_not_replaced(place, done, tmp_path):
    """The folder was empty when it was checked first: the other run comes when this one says what it prepares."""
    shutil.move(done, tmp_path / "other")

    class Watched(Console):
        def print(self, *_, **__):
            if not done.exists():
                shutil.copytree(tmp_path / "other", done)

    told = r"already holds a run; go on with it by --resume, or by: torchtrain resume .*; or choose"
    with pytest.raises(UserError, match=told):
        recipe.train(load_config(place.config, [f"run.folder={done}"]), console=Watched(quiet=True))
    assert tree_of(done) == tree_of(tmp_path / "other")


def test_killed_while_it_replaces(place, straight):
    """The old run is whole under its new name, and the same command goes on."""
    folder, aside = place.folder / "replaced", place.folder / "replaced.replaced-1"
    shutil.copytree(straight, folder)
    assert place.train("replaced", "--replace", at="replacement") == -signal.SIGKILL
    assert not os.path.lexists(folder / "run.json")
    assert_same(aside, straight)
    assert place.train("replaced", "--replace") == 0, place.log("replaced")
    assert_same(folder, straight)


# --- where a run may stand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("written", "replace"), [("new/../data", True), ("link/data", False)])
def test_a_path_is_resolved_before_it_is_looked_at(fresh, written, replace):
    """`new` is not there, so nothing is seen behind `..`, until making it gives the path its meaning."""
    train, here = fresh
    (here / "data").mkdir()
    (here / "data" / "thesis.txt").write_text("years of work")
    (here / "link").symlink_to(here)
    before = tree_of(here)
    with pytest.raises(UserError, match=rf"run.folder {here}/data: holds files and is not recognised as a run"):
        train(f"{here}/{written}", replace=replace)
    assert tree_of(here) == before


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("/", "is the root of all folders"),
        ("run\0", "no folder can have this name"),
        ("r" * 256, "file name too long"),
        ("~nobody-of-this-name/run", "~ names the folder of a user who is not here"),
        ("dangling/run", "is a link to what is not there"),
        ("dangling", "is a link to what is not there"),
        ("/etc/passwd/run", "Not a directory"),
    ],
    ids=["root", "nul", "256", "user", "dangling", "link", "file"],
)
def test_a_folder_that_cannot_be_is_one_line(place, tmp_path, monkeypatch, folder, told):
    (tmp_path / "dangling").symlink_to(tmp_path / "not" / "mounted")
    monkeypatch.chdir(tmp_path)
    config = load_config(place.config)
    before = sorted(tmp_path.iterdir())
    for section, name in (("run", "folder"), ("data", "cache")):
        if name == "cache" and told in ("is the root of all folders", "Not a directory"):
            continue
        changed = getattr(config, section).model_copy(update={name: folder})
        with pytest.raises(UserError, match=told) as caught:
            recipe.train(
                config.model_copy(update={"run": config.run.model_copy(update={"folder": "run"}), section: changed})
            )
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500
    assert sorted(tmp_path.iterdir()) == before
