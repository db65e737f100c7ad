"""Nothing of a user's is removed: where a run may stand, what --replace and resume take away, and what counts as
finished.
"""

import json
import os
import shutil
import signal
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import safetensors.torch
import torch

from anchorline import files
from anchorline.errors import UserError
from anchorline.files import entries_of, remove, resolve
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import folder as folder_module
from torchtrain.run import recipe
from torchtrain.run.folder import RunFolder
from torchtrain.run.status import status_lines
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import QUIET
from torchtrain.tests.runs import assert_same, content, unprivileged

# --- where a run may stand --------------------------------------------------------------------------------------------


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


@pytest.fixture
def fresh(place, tmp_path):
    """Return a function that trains in this process with `run.folder`, two steps; and the folder that it is relative
    to.
    """

    def train(folder: str, *overrides: str, replace: bool = False):
        changes = ["save.last=1", "train.steps=2", *overrides, f"run.folder={json.dumps(str(folder))}"]
        return recipe.train(load_config(place.config, changes), replace=replace, console=QUIET)

    return train, tmp_path


@pytest.mark.parametrize("written", ["new/../data", "a/b/../../data", "data/../new/../data/.", "link/data"])
@pytest.mark.parametrize("replace", [False, True])
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


def test_the_working_directory_is_never_replaced(fresh, monkeypatch):
    train, here = fresh
    (here / "w").mkdir()
    monkeypatch.chdir(here / "w")
    inode = (here / "w").stat().st_ino
    assert train("a/../../w", "train.steps=1") is not None
    assert (here / "w").stat().st_ino == inode, "an empty folder is used as it is, with its rights and its place"
    assert (here / "w" / "model" / "config.json").is_file()
    assert [path.name for path in here.iterdir()] == ["w"]


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("/", "is the root of all folders"),
        ("x/../" * 40 + "/", "is the root of all folders"),
        ("run\0", "no folder can have this name"),
        ("run\ud800", "no folder can have this name"),
        ("r" * 5000, "file name too long"),
        ("r/" * 2500, "file name too long"),
        ("r" * 256, "file name too long"),
        ("~nobody-of-this-name/run", "~ stands for the folder of nobody here"),
        ("dangling/run", "is a link to what is not there"),
        ("dangling", "is a link to what is not there"),
        ("round/run", "is a link to what is not there"),
        ("/etc/passwd/run", "Not a directory"),
    ],
    ids=["root", "rooted", "nul", "surrogate", "name", "path", "256", "user", "dangling", "link", "loop", "file"],
)
def test_a_folder_that_cannot_be_is_one_line(place, tmp_path, monkeypatch, folder, told):
    (tmp_path / "dangling").symlink_to(tmp_path / "not" / "mounted")
    (tmp_path / "round").symlink_to(tmp_path / "round")
    monkeypatch.chdir(tmp_path)
    config = load_config(place.config)
    before = sorted(tmp_path.iterdir())
    folder = folder if not folder.startswith("x/") else os.path.relpath("/", tmp_path)
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


def test_what_is_resolved():
    here = Path.cwd()
    assert resolve("f", "a/../b") == here / "b"
    assert resolve("f", "~") == Path.home().resolve()


def test_a_run_beside_strangers(fresh):
    """Nothing that only looks like a leftover of ours is touched; what an older trainer left beside is not ours to
    remove.
    """
    train, here = fresh
    for name in ("run.deleted", "run.partial", "run.partial-abcd1234"):
        (here / name).mkdir()
        (here / name / "precious").write_text(name)
    before = tree_of(here)
    train(f"{here}/run")
    train(f"{here}/run", replace=True)
    assert {name: of for name, of in tree_of(here).items() if not name.startswith("run/")} == before


def test_a_process_that_makes_a_run_keeps_others_out(place, tmp_path, monkeypatch):
    """From before there is anything to see."""
    config = load_config(place.config)
    real, told = folder_module.write_all, []

    def meanwhile(*arguments):
        monkeypatch.undo()
        with pytest.raises(UserError) as caught:
            RunFolder(tmp_path / "run").create(config, {}, replace=True).__enter__()
        told.append(str(caught.value))
        return real(*arguments)

    monkeypatch.setattr(folder_module, "write_all", meanwhile)
    with RunFolder(tmp_path / "run").create(config, {"identity": {}}, replace=False):
        assert "at work" in told[0]
        assert next(status_lines(tmp_path / "run")).endswith("at work")
    assert next(status_lines(tmp_path / "run")).endswith("interrupted")


# --- what --replace removes -------------------------------------------------------------------------------------------


@pytest.fixture
def done(place, straight, tmp_path) -> Path:
    """A copy of a finished run, with checkpoints, exports and a model."""
    return Path(shutil.copytree(straight, tmp_path / "run"))


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


def as_before_there_was_a_list(run: Path) -> None:
    """Make a run what an older trainer left."""
    record = json.loads((run / "run.json").read_text())
    del record["format"]
    (run / "run.json").write_text(json.dumps(record))
    (run / "outputs.json").unlink()


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


# --- what resume takes away -------------------------------------------------------------------------------------------


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
    """What a disk that is not mounted looks like; `timing.jsonl` need not be there to tell."""
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (run / "timing.jsonl").unlink()
    before = tree_of(run)
    with pytest.raises(UserError, match=r"checkpoints are gone, and there was one of step 2"):
        resumed(run)
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
    fault = "line . is damaged: it has no name of an event" if how == "a line" else "not a regular file"
    with pytest.raises(UserError, match=rf"{run}/timing.jsonl: {fault}; .* torchtrain resume {run} --step 0"):
        resumed(run)
    assert tree_of(run) == before


def test_resume_says_what_is_in_the_place_of_its_timings(stopped, tmp_path):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    (run / "timing.jsonl").unlink()
    os.mkfifo(run / "timing.jsonl")
    with pytest.raises(UserError, match=rf"not a regular file \({run}/timing.jsonl\)"):
        resumed(run)


def test_verify_sees_what_is_gone(done):
    shutil.rmtree(done / "checkpoints")
    (done / "checkpoints").mkdir()
    (done / "outputs.json").unlink()
    told = {found.what: found.said for found in verify_folder(done) if not found.good}
    assert told["checkpoints"] == "are gone, and there was one of step 6"
    assert "lists no model" in told["outputs.json"]


def test_verify_does_not_depend_on_where_it_is_called(done, monkeypatch, tmp_path):
    record = json.loads((done / "run.json").read_text())
    record["config"]["data"]["cache"] = "cache"
    (done / "run.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    assert all(found.good for found in verify_folder(done))


def test_a_model_that_is_forgotten_is_not_missed(done):
    RunFolder(done).forget_after(2, 6)
    assert [found for found in verify_folder(done) if not found.good] == []
    assert list(RunFolder(done).listed_models()) == ["exports/step-00000002"]


def test_status_tells_the_rest_of_a_damaged_run(done):
    with (done / "timing.jsonl").open("a") as file:
        file.write("null\n3\n[]\n")
    lines = list(status_lines(done))
    assert [line for line in lines if line.startswith("damaged") and "timing.jsonl: line" in line]
    assert [line for line in lines if line.startswith("checkpoint step 6")]
    assert [line for line in lines if line == f"model      {done}/model"]


def test_a_copy_that_looks_like_what_is_being_removed_stays(fresh, done):
    """Its files are the run's, byte by byte: only the record tells that it is the user's."""
    train, _ = fresh
    for name in ("model.deleted", "exports/step-00000002.deleted-1"):
        shutil.copytree(done / name.partition(".deleted")[0], done / name)
    RunFolder(done).forget_after(2, 6)
    RunFolder(done).sweep()
    assert (done / "model.deleted" / "config.json").exists()
    assert not (done / "model").exists()
    before = tree_of(done)
    with pytest.raises(
        UserError, match=r"holds exports/step-00000002.deleted-1/.*, which is not recognised as the run's"
    ):
        train(done, replace=True)
    assert tree_of(done) == before


@pytest.mark.parametrize("replaced", [False, True])
def test_an_export_whose_removal_was_cut_short_goes(fresh, done, monkeypatch, replaced):
    train, _ = fresh
    with monkeypatch.context() as patch:
        patch.setattr("torchtrain.run.folder.remove", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            RunFolder(done).forget_after(2, 6)
    left = [path.name for path in done.glob("**/*.deleted")]
    assert len(left) == 1
    if replaced:
        train(done, replace=True)
    else:
        RunFolder(done).sweep()
        assert '"removing": null' in (done / "outputs.json").read_text()
    assert not list(done.glob("**/*.deleted"))


def assert_same_but(run: Path, straight: Path, name: str) -> None:
    mine, theirs = content(run), content(straight)
    assert {of: was for of, was in mine.items() if of != name} == theirs


def test_beginning_anew_is_noted(place, interrupted):
    """Killed before its first save, a run that was begun anew has no checkpoint, and is not asked for one."""
    assert place.resume(interrupted, "--step", "0", at="gradient", nth=1) == -signal.SIGKILL
    assert place.resume(interrupted) == 0, place.log(interrupted)
    assert "it has no checkpoint" in place.log(interrupted)


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


# --- what is finished -------------------------------------------------------------------------------------------------


def resumed(run: Path):
    return recipe.resume(load_config(run / "config.yaml", [f"run.folder={run}"]), console=QUIET)


@pytest.mark.parametrize("older", [False, True])
def test_an_empty_model_beside_a_picture_is_not_finished(done, straight, older):
    if older:
        as_before_there_was_a_list(done)
    shutil.rmtree(done / "model")
    (done / "model").mkdir()
    assert next(status_lines(done)).endswith(": interrupted")
    assert resumed(done) is not None
    assert next(status_lines(done)).endswith(": finished")
    assert {name: of for name, of in content(done).items() if name != "outputs.json"} == {
        name: of for name, of in content(straight).items() if name != "outputs.json"
    }


@pytest.mark.parametrize("older", [False, True])
def test_a_model_that_is_cut_off_is_not_finished(done, older):
    if older:
        as_before_there_was_a_list(done)
    weights = done / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = tree_of(done / "model")
    assert next(status_lines(done)).endswith(": interrupted")
    with pytest.raises(
        UserError, match=rf"{done}/model.*; move {done}/model elsewhere, then: torchtrain resume {done}"
    ):
        resumed(done)
    assert tree_of(done / "model") == before


def test_a_model_whose_content_changed_is_named(done):
    config = done / "model" / "config.json"
    config.write_text(config.read_text().replace("0", "1", 1))
    with pytest.raises(UserError, match=rf"{config}: its content has changed .*; move {done}/model elsewhere"):
        resumed(done)


def test_a_model_that_lost_a_file_is_made_anew(done, straight):
    (done / "model" / "tokenizer.json").unlink()
    assert next(status_lines(done)).endswith(": interrupted")
    assert resumed(done) is not None
    assert_same(done, straight)


def test_the_plot_does_not_matter(done):
    (done / "loss.png").unlink()
    assert resumed(done) is None


def test_outputs_say_what_was_exported(straight):
    outputs = json.loads((straight / "outputs.json").read_text())
    assert outputs["finished"] == 6
    assert outputs["writing"] is None
    assert set(outputs["models"]) == {"model", "exports/step-00000002", "exports/step-00000004"}
    for name, listed in outputs["models"].items():
        assert listed == {file: entry.model_dump() for file, entry in entries_of(straight / name).items()}


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
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


# --- weights that are not numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [1, 0])
@pytest.mark.parametrize("what", ["nan", "inf"])
def test_weights_that_the_last_step_spoils_are_not_exported(fresh, monkeypatch, save, what):
    train, here = fresh
    real, calls = torch.optim.AdamW.step, []

    def step(optimizer, *arguments):
        out = real(optimizer, *arguments)
        calls.append(1)
        if len(calls) == 2:
            optimizer.param_groups[0]["params"][1].data.view(-1)[7] = float(what)
        return out

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(
        UserError, match=r"(master of )?model\.layers\.0\.\S+ is not finite after step 2; .*learning_rate"
    ):
        train(here / "run", f"save.every={save}")
    assert not (here / "run" / "model").exists()
    assert Checkpoints(here / "run" / "checkpoints").steps() == [1][:save]
    lines = list(status_lines(here / "run"))
    assert lines[0].endswith("interrupted")


def test_weights_that_a_step_spoils_are_named_by_the_next(fresh, monkeypatch):
    """However many bad steps may be left out: leaving them out is of no use."""
    train, here = fresh
    real, calls = torch.optim.AdamW.step, []

    def step(optimizer, *arguments):
        out = real(optimizer, *arguments)
        calls.append(1)
        if len(calls) == 1:
            optimizer.param_groups[0]["params"][1].data.view(-1)[7] = float("nan")
        return out

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(UserError, match=r"model\.layers\.0\.\S+ is not finite before step 2; so the loss is nan"):
        train(here / "run", "save.every=0", "train.steps=4", "train.skip_bad_steps=4")


@pytest.mark.parametrize("what", [float("nan"), float("inf")])
def test_a_source_whose_weights_are_no_numbers_is_named_early(fresh, place, what):
    train, here = fresh
    shutil.copytree(place.folder / "source", here / "source")
    path = here / "source" / "model.safetensors"
    weights = safetensors.torch.load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"].view(-1)[5] = what
    safetensors.torch.save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(
        UserError, match=r"model.source .*: model.layers.1.mlp.up_proj.weight holds a number that is not finite"
    ):
        train(here / "run", f"model.source={here}/source")
    assert not (here / "run").exists()


# --- damaged files ----------------------------------------------------------------------------------------------------

DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "zeros": b"\0" * 100,
    "a list": b"[1]\n",
    "a number": b"1\n",
    "no json": b"{\n",
    "binary": bytes(range(256)) * 4,
    "an object": b'{"event": "step", "step": "x", "loss": null}\n',
    "another object": b'{"made_by": "torchtrain train", "event": "evaluation", "step": 1e400, "loss": "0"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "deep object": b'{"event": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}\n",
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


@pytest.fixture(scope="module")
def stopped(place, straight) -> Path:
    assert place.train("stopped", at="gradient", nth=5) == -signal.SIGKILL
    return place.folder / "stopped"


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
        for verb in (lambda: list(status_lines(run)), lambda: resumed(run)):
            try:
                told += verb() or []
            except UserError as error:
                told.append(str(error))
            except pytest.fail.Exception:  # it went on
                told.append(f"{path} does not matter")
        assert not [line for line in told if "\n" in line]
        if name != "config.yaml":
            assert any(
                "holds no run of ours" in line or path.name in line or "step 4, damaged" in line for line in told
            ), told
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(was)
    with pytest.raises(pytest.fail.Exception):
        resumed(run)


@pytest.mark.parametrize("name", [".", *DAMAGED, "checkpoints", "checkpoints/step-00000004", "bad_steps", "exports"])
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


def test_records_that_lack_something(stopped, tmp_path):
    run = Path(shutil.copytree(stopped, tmp_path / "run"))
    record = json.loads((run / "run.json").read_text())
    for change in (
        {"config": None},
        {"config": []},
        {"config": {}},
        {"config": {"train": []}},
        {"config": {"train": {"steps": "6"}}},
        {"config": {"train": {"steps": 10**25}}},
        {"identity": None},
    ):
        (run / "run.json").write_text(json.dumps(record | change))
        for verb in (lambda: list(status_lines(run)), lambda: resumed(run)):
            with pytest.raises(UserError, match=r"run.json: is damaged: it lacks the config or the identity"):
                verb()


def test_a_step_of_no_number_is_not_ours(done):
    (done / "exports" / "step-abcdefgh").mkdir()
    (done / "checkpoints" / "step-x").mkdir()
    assert not [line for line in status_lines(done) if "abcdefgh" in line or "step-x" in line]
    assert resumed(done) is None
    RunFolder(done).forget_after(0, 6)
    assert (done / "exports" / "step-abcdefgh").is_dir()


def test_names_in_a_record_do_not_lead_out_of_the_folder(done, tmp_path):
    (tmp_path / "precious").write_text("the user's")
    outputs = json.loads((done / "outputs.json").read_text())
    for folder, name in (
        ("model", "../../precious"),
        ("model", f"{tmp_path}/precious"),
        ("../..", "precious"),
        (".", "x"),
    ):
        (done / "outputs.json").write_text(
            json.dumps(outputs | {"models": {folder: {name: {"bytes": 1, "sha256": ""}}}})
        )
        for verb in (lambda: list(status_lines(done)), lambda: resumed(done)):
            with pytest.raises(UserError, match=rf"{done}/outputs.json: is damaged"):
                verb()


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="not a regular file"):
        files.entry_of(tmp_path / "pipe")
