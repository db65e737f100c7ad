"""Where a run may stand: its folder is resolved before it is looked at, and what is there stays."""

import pytest
from typer.testing import CliRunner

from anchorline.errors import UserError, quoted
from anchorline.files import resolve_folder
from torchtrain.cli import app
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.tests.runs import tree_of


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


def test_an_out_that_is_a_file_is_refused_and_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    assert resolve_folder("--out", tmp_path / "new") == tmp_path / "new"
    file = str(tmp_path / "file")
    for command in (
        ["bench", "attention", "configs/bench/cpu.yaml"],
        ["prepare", "configs/data/slimpajama-128k.yaml"],
    ):
        ended = CliRunner().invoke(app, [*command, "--out", file])
        assert ended.exit_code == 2, command
        assert f"--out {quoted(file)}: is a file; give the name of a folder" in ended.stderr
    assert (tmp_path / "file").read_text() == "mine"
