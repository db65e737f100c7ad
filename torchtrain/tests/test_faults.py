"""What can go wrong around a run, each fault injected: signals, locks, disks, damage, changed material."""

import errno
import json
import math
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from anchorline import files
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.errors import Terminated
from torchtrain.run import recipe
from torchtrain.run.lock import hold, is_held
from torchtrain.run.status import status_lines
from torchtrain.run.termination import Termination
from torchtrain.run.verify import verify_folder
from torchtrain.tests.run_fixtures import (
    QUIET,
    WAITING,
    fails,
    resume,
)
from torchtrain.tests.runs import assert_same, tree_of
from torchtrain.tests.tiny import refused

# --- SIGTERM ----------------------------------------------------------------------------------------------------------

# Of a run that was stopped in step 5: it keeps those of 5 and 6, and one that nothing stopped those of 4 and 6.
OTHER_CHECKPOINTS = ("checkpoints/step-00000004/", "checkpoints/step-00000005/")


@pytest.mark.parametrize(("name", "number", "code"), [("SIGTERM", signal.SIGTERM, 143), ("Ctrl-C", signal.SIGINT, 130)])
def test_a_signal_in_a_step_saves_after_it(place, straight, name, number, code):
    assert place.train(name, WAITING, at="gradient", nth=3, signal=number) == code
    folder = place.folder / name
    assert place.last_line(name) == (
        f"torchtrain: stopped by {name} after step 3, which is saved; to resume: torchtrain resume {folder}"
    )
    how = "the run finishes the step that runs now, saves it, and ends; step 2 is saved so far"
    assert f"{name:<10}{how}; {name} again ends it at once" in place.log(name)
    assert Checkpoints(folder / "checkpoints").steps() == [2, 3]
    assert place.resume(name) == 0
    assert_same(folder, straight)


ALL_LONG = {"set": {"torchtrain.run.recipe._LONG": 0.0}}
DROPOUT = ("model.lora.rank=2", "model.lora.dropout=0.5")  # draws random numbers in every micro-batch


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("overrides", "nth", "steps", "number", "code", "how"),
    [
        ((), 1, [], signal.SIGTERM, 143, "SIGTERM in step 1; nothing is saved"),
        ((), 4, [2, 3], signal.SIGINT, 130, "Ctrl-C after step 3, which is saved"),
        (DROPOUT, 1, [], signal.SIGINT, 130, "Ctrl-C in step 1; nothing is saved"),
        (DROPOUT, 3, [2], signal.SIGTERM, 143, "SIGTERM after step 2, which is saved"),
        (DROPOUT, 6, [4, 5], signal.SIGTERM, 143, "SIGTERM after step 5, which is saved"),
    ],
)
def test_a_signal_in_a_long_step_does_not_wait_for_its_end(place, straight, overrides, nth, steps, number, code, how):
    """The step is taken again, with the same bits. The first step counts as long."""
    if overrides and not (place.folder / "straight-dropout").exists():
        assert place.train("straight-dropout", *overrides) == 0
    name = f"long-{len(overrides)}-{nth}"
    more = ALL_LONG if nth > 1 else {}
    assert place.train(name, WAITING, *overrides, at="gradient", nth=nth, signal=number, **more) == code
    folder = place.folder / name
    assert place.last_line(name) == f"torchtrain: stopped by {how}; to resume: torchtrain resume {folder}"
    saved = f"step {steps[0]} is saved so far" if steps else "no step is saved so far"
    answer = f"the run ends after the micro-batch that runs now, and saves the steps that are done; {saved}; "
    assert answer in place.log(name)
    assert Checkpoints(folder / "checkpoints").steps() == steps
    assert place.resume(name) == 0
    assert_same(folder, place.folder / "straight-dropout" if overrides else straight, but=OTHER_CHECKPOINTS)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("phase", "number", "said"),
    [
        ("config", signal.SIGTERM, "stopped by SIGTERM"),
        ("tokenizer", signal.SIGTERM, "stopped by SIGTERM"),
        ("model", signal.SIGTERM, "stopped by SIGTERM"),
        ("model", signal.SIGINT, "interrupted"),
    ],
)
def test_no_library_takes_a_signal_for_its_own_error(place, phase, number, said):
    name = f"reading-{phase}"
    assert place.train(name, at=phase, signal=number) == {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
    assert place.last_line(name) == f"torchtrain: {said}; there is no run yet: start it again"


def test_a_signal_that_a_library_swallows_is_obeyed_before_the_first_step():
    """As in a destructor, from which Python lets no exception out."""
    with Termination() as termination:
        termination.advice = "to resume"
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Terminated, match=r"^stopped by SIGTERM; to resume$"), termination.defer():
            pytest.fail("the steps began")


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("phase", "nth", "steps", "number", "code", "told"),
    [
        ("evaluation", 1, [], signal.SIGTERM, 143, "stopped by SIGTERM"),
        ("evaluation", 3, [4, 6], signal.SIGTERM, 143, "stopped by SIGTERM after step 6"),
        ("export", 3, [4, 6], signal.SIGTERM, 143, "stopped by SIGTERM; to resume from the last checkpoint"),
        (
            "evaluation",
            1,
            [],
            signal.SIGINT,
            130,
            "torchtrain: interrupted; to resume from the last checkpoint: torcht",
        ),
    ],
)
def test_a_signal_anywhere_else_ends_at_once(place, straight, phase, nth, steps, number, code, told):
    name = f"term-{phase}-{nth}-{code}"
    assert place.train(name, at=phase, nth=nth, signal=number) == code
    assert told in place.last_line(name)
    assert Checkpoints(place.folder / name / "checkpoints").steps() == steps
    assert place.resume(name) == 0
    assert_same(place.folder / name, straight)


def test_sigterm_at_the_end_loses_no_step(place, straight):
    """Of a number of steps that `save.every` does not divide; and of a run that saves nothing on its own."""
    assert place.train("term-odd", "train.steps=5", at="export", nth=3, signal=signal.SIGTERM) == 143
    assert Checkpoints(place.folder / "term-odd" / "checkpoints").steps() == [4, 5]
    never = ("save.every=0", "save.last=1")
    assert place.train("term-none", *never, at="evaluation", nth=3, signal=signal.SIGTERM) == 143
    assert "after step 6, which is saved" in place.last_line("term-none")
    assert place.resume("term-none") == 0
    assert (place.folder / "term-none" / "metrics.jsonl").read_bytes() == (straight / "metrics.jsonl").read_bytes()


def test_sigterm_before_there_is_a_run(place):
    assert place.train("term-early", at="folder", signal=signal.SIGTERM) == 143
    assert place.last_line("term-early") == "torchtrain: stopped by SIGTERM; there is no run yet: start it again"
    assert not (place.folder / "term-early").exists()


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_sigterm_while_saving_lets_the_save_end(place, straight, asynchronous):
    kept = {"4, which": [2, 4], "5, which": [4, 5], "6, which": [4, 6]}  # the step that training is in meanwhile
    name = f"term-save-{asynchronous}"
    more = f"save.asynchronous={asynchronous}"
    assert place.train(name, more, at="manifest", nth=2, signal=signal.SIGTERM) == 143
    (steps,) = [steps for step, steps in kept.items() if f"after step {step} is saved" in place.last_line(name)]
    assert steps == [2, 4] or asynchronous == "true"
    assert Checkpoints(place.folder / name / "checkpoints").steps() == steps
    assert place.resume(name) == 0
    assert_same(place.folder / name, straight, but=OTHER_CHECKPOINTS if steps == [4, 5] else ())


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
