"""SIGTERM and Ctrl-C at any moment of a run: what is said, what is saved, and that it is resumed with the same bits."""

import os
import signal
from contextlib import suppress

import pytest

from torchtrain.checkpoint.store import Checkpoints
from torchtrain.errors import Terminated
from torchtrain.run.termination import Termination
from torchtrain.tests.run_fixtures import WAITING
from torchtrain.tests.runs import assert_same

TERM, INT = signal.SIGTERM, signal.SIGINT
NAMES, CODES = {TERM: "SIGTERM", INT: "Ctrl-C"}, {TERM: 143, INT: 130}
LORA = "model.lora={rank: 2, dropout: 0.5}"  # draws random numbers in every micro-batch
NEVER = "save={every: 0, last: 1}"
# A run that was stopped in step 5 keeps those of 5 and 6, and one that nothing stopped those of 4 and 6.
OTHER_CHECKPOINTS = ("checkpoints/step-00000004/", "checkpoints/step-00000005/")
SHORT = {"set": {"torchtrain.run.recipe._LONG": 1e9}}  # the first step counts as long
LONG = {"set": {"torchtrain.run.recipe._LONG": 0.0}}
# Where the signal comes, in which run, after which step the run ends, and the checkpoints that it leaves.
IN_A_STEP = [
    (3, TERM, (), SHORT, "after step 3, which is saved", [2, 3]),
    (3, INT, (), SHORT, "after step 3, which is saved", [2, 3]),
    # The step is left, and taken again with the same bits.
    (1, TERM, (), {}, "in step 1; nothing is saved", []),
    (4, INT, (), LONG, "after step 3, which is saved", [2, 3]),
    (1, INT, (LORA,), {}, "in step 1; nothing is saved", []),
    (3, TERM, (LORA,), LONG, "after step 2, which is saved", [2]),
    (6, TERM, (LORA,), LONG, "after step 5, which is saved", [4, 5]),
]
ELSEWHERE = [
    ("evaluation", 1, TERM, (), "stopped by SIGTERM; to resume from the last checkpoint: ", []),
    ("evaluation", 1, INT, (), "interrupted; to resume from the last checkpoint: ", []),
    ("evaluation", 3, TERM, (), "stopped by SIGTERM after step 6, which is saved; ", [4, 6]),
    ("export", 3, TERM, (), "stopped by SIGTERM; to resume from the last checkpoint: ", [4, 6]),
    # At the end no step is lost that `save.every` does not divide, nor of a run that saves nothing on its own.
    ("export", 3, TERM, ("train.steps=5",), "stopped by SIGTERM; to resume from the last checkpoint: ", [4, 5]),
    ("evaluation", 3, TERM, (NEVER,), "stopped by SIGTERM after step 6, which is saved; ", [6]),
]


def assert_resumed(place, name, overrides):
    """Resume a run, and compare it with one that nothing stopped."""
    whole = "straight" + "".join(filter(str.isalnum, "".join(overrides)))
    if not (place.folder / whole).exists():
        assert place.train(whole, *overrides) == 0, place.log(whole)
    assert place.resume(name) == 0, place.log(name)
    but = ("checkpoints/",) if NEVER in overrides else OTHER_CHECKPOINTS
    assert_same(place.folder / name, place.folder / whole, but=but)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("nth", "number", "overrides", "how", "told", "steps"), IN_A_STEP)
def test_in_a_step(place, straight, nth, number, overrides, how, told, steps):
    name = f"in-{nth}-{CODES[number]}-{len(overrides)}"
    assert place.train(name, WAITING, *overrides, at="gradient", nth=nth, signal=number, **how) == CODES[number]
    folder, called = place.folder / name, NAMES[number]
    assert place.last_line(name) == f"torchtrain: stopped by {called} {told}; to resume: torchtrain resume {folder}"
    ends = "ends after the micro-batch that runs now, and saves the steps that are done"
    if how is SHORT:
        ends = "finishes the step that runs now, saves it, and ends"
    saved = f"step {steps[0]} is saved so far" if steps else "no step is saved so far"
    assert f"{called:<10}the run {ends}; {saved}; {called} again ends it at once" in place.log(name)
    assert Checkpoints(folder / "checkpoints").steps() == steps
    assert_resumed(place, name, overrides)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("phase", "nth", "number", "overrides", "told", "steps"), ELSEWHERE)
def test_elsewhere_it_ends_at_once(place, straight, phase, nth, number, overrides, told, steps):
    name = f"{phase}-{nth}-{CODES[number]}-{len(''.join(overrides))}"
    assert place.train(name, *overrides, at=phase, nth=nth, signal=number) == CODES[number]
    assert place.last_line(name).startswith(f"torchtrain: {told}")
    assert Checkpoints(place.folder / name / "checkpoints").steps() == steps
    assert_resumed(place, name, overrides)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("phase", "number"), [("folder", TERM), ("config", TERM), ("tokenizer", TERM), ("model", INT), ("model", TERM)]
)
def test_before_there_is_a_run(place, phase, number):
    """And no library takes the signal for an error of its own."""
    name = f"early-{phase}-{CODES[number]}"
    assert place.train(name, at=phase, signal=number) == CODES[number]
    how = "interrupted" if number == INT else "stopped by SIGTERM"
    assert place.last_line(name) == f"torchtrain: {how}; there is no run yet: start it again"
    assert not (place.folder / name).exists()


@pytest.mark.parametrize("nth", [1, 2])
def test_before_a_resumed_run_is_set_up(place, straight, nth):
    assert place.resume("straight", *(["--step", "4"] if nth == 2 else []), at="record", nth=nth, signal=TERM) == 143
    assert place.last_line("straight").startswith("torchtrain: stopped by SIGTERM; to resume from the last checkpoint")


def test_one_that_a_library_swallows_is_obeyed_before_the_first_step():
    """As in a destructor, from which Python lets no exception out."""
    with Termination() as termination:
        termination.advice = "to resume"
        with suppress(BaseException):
            os.kill(os.getpid(), TERM)
        with pytest.raises(Terminated, match=r"^stopped by SIGTERM; to resume$"), termination.defer():
            pytest.fail("the steps began")


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_while_saving_the_save_ends(place, straight, asynchronous):
    kept = {"4, which": [2, 4], "5, which": [4, 5], "6, which": [4, 6]}  # the step that training is in meanwhile
    name, more = f"save-{asynchronous}", f"save.asynchronous={asynchronous}"
    assert place.train(name, more, at="manifest", nth=2, signal=TERM) == 143
    (steps,) = [steps for step, steps in kept.items() if f"after step {step} is saved" in place.last_line(name)]
    assert steps == [2, 4] or asynchronous == "true"
    assert Checkpoints(place.folder / name / "checkpoints").steps() == steps
    assert_resumed(place, name, ())
