"""What counts as finished, and what a finished run leaves."""

import json
import os
import shutil
import stat

import pytest

from anchorline.errors import UserError
from anchorline.files import entries_of
from torchtrain.run.status import status_lines
from torchtrain.tests.run_fixtures import resume
from torchtrain.tests.runs import assert_same, content, tree_of


def test_an_empty_model_beside_a_picture_is_not_finished(done, straight):
    shutil.rmtree(done / "model")
    (done / "model").mkdir()
    assert next(status_lines(done)).endswith(": interrupted")
    assert resume(done) is not None
    assert next(status_lines(done)).endswith(": finished")
    assert {name: of for name, of in content(done).items() if name != "outputs.json"} == {
        name: of for name, of in content(straight).items() if name != "outputs.json"
    }


def test_a_model_that_is_cut_off_is_not_finished(done):
    weights = done / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    before = tree_of(done / "model")
    assert next(status_lines(done)).endswith(": interrupted")
    with pytest.raises(
        UserError, match=rf"{done}/model.*; move {done}/model elsewhere, then: torchtrain resume {done}"
    ):
        resume(done)
    assert tree_of(done / "model") == before


def test_a_model_whose_content_changed_is_named(done):
    config = done / "model" / "config.json"
    config.write_text(config.read_text().replace("0", "1", 1))
    with pytest.raises(UserError, match=rf"{config}: its content has changed .*; move {done}/model elsewhere"):
        resume(done)


def test_a_model_that_lost_a_file_is_made_anew(done, straight):
    (done / "model" / "tokenizer.json").unlink()
    assert next(status_lines(done)).endswith(": interrupted")
    assert resume(done) is not None
    assert_same(done, straight)


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
