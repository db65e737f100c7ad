"""What can go wrong around a run, each fault injected: locks, disks, changed material; and what a run leaves."""

import errno
import json
import math
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorline import files
from anchorline.errors import UserError
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.run.lock import hold, is_held
from torchtrain.run.status import status_lines
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import (
    QUIET,
    WAITING,
    fails,
    resume,
)
from torchtrain.tests.runs import assert_same, tree_of
from torchtrain.tests.tiny import refused

# --- who may work where -----------------------------------------------------------------------------------------------


def test_two_processes_in_one_folder(place, interrupted):
    folder = place.folder / interrupted
    assert not is_held(folder / ".lock")
    with hold(folder / ".lock"):
        assert is_held(folder / ".lock")
        message = (
            f"torchtrain: run.folder {folder}: another process is at work in it; stop that, or choose another folder"
        )
        for run in (place.resume, lambda name: place.train(name, "--replace")):
            assert run(interrupted) == 2
            assert place.last_line(interrupted) == message
        assert "data  " not in place.log(interrupted).split(message)[1], "it is refused before anything is tokenised"
        assert next(status_lines(folder)).endswith("at work")
    assert not is_held(folder / ".lock")


# --- disks and damage -------------------------------------------------------------------------------------------------


def test_a_run_that_was_taken_up_earlier_has_no_other_future(place, straight, interrupted):
    """Its later checkpoints would be those of another run: they would push the new ones out, and a resume would take
    them up.
    """
    folder = place.folder / interrupted
    short = {"set": {"torchtrain.run.recipe._LONG": math.inf}}
    assert place.resume(interrupted, "--step", "0", at="gradient", nth=1, signal=signal.SIGTERM, **short) == 143
    assert "after step 1, which is saved" in place.last_line(interrupted)
    assert Checkpoints(folder / "checkpoints").steps() == [1]
    assert not (folder / "exports").exists() or not list((folder / "exports").iterdir())
    assert place.resume(interrupted) == 0
    assert_same(folder, straight)


def test_a_link_in_a_run_is_unlinked_and_what_it_leads_to_stays(place, straight, stopped, tmp_path):
    """An old checkpoint was moved to a larger disk; and what looks like the rest of an interruption is a link."""
    run, disk = Path(shutil.copytree(stopped, tmp_path / "run")), tmp_path / "disk"
    shutil.move(run / "checkpoints" / "step-00000002", disk / "step-00000002")
    (disk / "file").write_text("mine")
    links = {
        "checkpoints/step-00000002": disk / "step-00000002",
        "checkpoints/step-00000006.partial": disk,
        "checkpoints/step-00000003.deleted": disk / "file",
        "model.partial": disk,
        "exports/step-00000004.partial": tmp_path / "nothing",
        "exports/step-00000002.deleted-1": disk,
    }
    for name, target in links.items():
        (run / name).symlink_to(target)
    kept = tree_of(disk)
    assert resume(run) is not None
    assert not [name for name in links if os.path.lexists(run / name)]
    assert tree_of(disk) == kept
    assert_same(run, straight)


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (
            "torchtrain.run.folder.commit",
            "model: the model could not be written: no space left on device (a file); step 6 is",
        ),
        ("torchtrain.run.report.plot", "no space left on device (a file)"),
        (
            "torchtrain.checkpoint.store.commit",
            "the checkpoint could not be written: no space left on device (a file); the last",
        ),
    ],
)  # fmt: skip
def test_a_disk_that_is_full_somewhere_else(run, monkeypatch, target, told):
    train, folder = run
    if "store" in target:  # the last save
        real, calls = files.commit, []
        monkeypatch.setattr(target, lambda *a: real(*a) if calls.append(1) or len(calls) < 3 else fails(errno.ENOSPC)())
    else:
        monkeypatch.setattr(target, fails(errno.ENOSPC))
    assert told in refused(train)
    assert not list(folder.glob("model*"))[1:], "nothing half-written is left"
    monkeypatch.undo()
    assert recipe.resume(load_config(folder / "config.yaml"), console=QUIET) is not None
    assert next(status_lines(folder)).endswith("finished")


# --- changed material -------------------------------------------------------------------------------------------------


def test_a_changed_data_set_tokenizer_or_model(place, interrupted):
    metrics = (place.folder / interrupted / "metrics.jsonl").read_bytes()
    documents, tokenizer, config = (
        place.folder / "documents.jsonl",
        place.folder / "source" / "tokenizer.json",
        place.folder / "source" / "config.json",
    )
    for path, change, message in (
        (
            documents,
            lambda text: text + text.splitlines()[0] + "\n",
            "data.sources have changed; put back the data",
        ),
        (
            tokenizer,
            lambda text: text.replace('"use_regex": true', '"use_regex": false'),
            "the tokenizer of model.source has changed",
        ),
        (
            config,
            lambda text: text.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
            "model.rms_norm_eps: 1e-06 in the run",
        ),
    ):
        was, times = path.read_text(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
        assert change(was) != was
        path.write_text(change(was), encoding="utf-8")
        code = place.resume(interrupted)
        path.write_text(was, encoding="utf-8")
        os.utime(path, ns=times)
        assert code == 2
        assert message in place.last_line(interrupted)
    assert (place.folder / interrupted / "metrics.jsonl").read_bytes() == metrics, "nothing was touched"


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("lora", "nth"), [((), 1), (("model.lora.rank=2",), 3)])  # killed in step `nth`
def test_the_weights_with_which_a_run_began_may_move_and_not_change(place, straight, tmp_path, lora, nth):
    source, name = tmp_path / "source", f"weights-{len(lora)}-{nth}"
    shutil.copytree(place.folder / "source", source)
    assert place.train(name, f"model.source={source}", *lora, WAITING, at="gradient", nth=nth) == -signal.SIGKILL
    weights = load_file(source / "model.safetensors")
    first, *_, last = weights
    for changed in (  # one unit in the last place, another order, another dtype of the same values
        weights | {last: torch.nextafter(weights[last], weights[last] + 1)},
        weights | {"model.norm.weight": weights["model.norm.weight"].flip(0)},
        weights | {first: weights[first].double()},
    ):
        save_file(changed, source / "model.safetensors", metadata={"format": "pt"})
        assert place.resume(name) == 2
        assert "the weights of model.source have changed; put back those of the run" in place.last_line(name)
        assert any("holds other weights than" in str(f) for f in verify_folder(place.folder / name) if not f.good)
    shutil.rmtree(source)
    two = [{name: x for name, x in weights.items() if (name == first) == one} for one in (True, False)]
    shutil.copytree(place.folder / "source", tmp_path / "moved")
    (tmp_path / "moved" / "model.safetensors").unlink()
    for number, part in enumerate(two):
        save_file(part, tmp_path / "moved" / f"{number}.safetensors", metadata={"format": "pt"})
    index = {
        "metadata": {},
        "weight_map": {name: f"{number}.safetensors" for number, part in enumerate(two) for name in part},
    }
    (tmp_path / "moved" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert place.resume(name, f"model.source={tmp_path / 'moved'}") == 0
    assert all(finding.good for finding in verify_folder(place.folder / name))
    if not lora:
        mine, theirs = ((of / "metrics.jsonl").read_bytes() for of in (place.folder / name, straight))
        assert mine == theirs


def test_a_corpus_that_was_tokenised_to_something_else(place, straight, interrupted):
    """Its files look the same by name, size and time, and the store was removed with its cache."""
    documents = place.folder / "documents.jsonl"
    was, times = documents.read_text(), (documents.stat().st_atime_ns, documents.stat().st_mtime_ns)
    shutil.rmtree(place.folder / "cache")
    documents.write_text(was.replace('"domain": "letters"', '"domain": "symbols"'), encoding="utf-8")
    os.utime(documents, ns=times)
    code = place.resume(interrupted)
    documents.write_text(was, encoding="utf-8")
    os.utime(documents, ns=times)
    shutil.rmtree(place.folder / "cache")
    assert code == 2
    assert "data.sources give other tokens" in place.last_line(interrupted)
    assert "tokens.domains" in place.last_line(interrupted)
    assert place.resume(interrupted) == 0
    assert_same(place.folder / interrupted, straight)


# --- what a run leaves, and what resume removes -----------------------------------------------------------------------


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
