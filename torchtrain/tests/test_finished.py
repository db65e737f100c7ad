"""When a run is finished, and what it leaves then."""

import json
import os
import stat

import pytest

from anchorline.errors import UserError
from anchorline.files import entries_of
from torchtrain.run.status import status_lines
from torchtrain.tests.run_fixtures import resume
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
