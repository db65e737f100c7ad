"""A run that is killed, by SIGKILL and in real processes, and resumed, leaves bit for bit what one that never was
does.
"""

import signal

import pytest

from benchmarks.soak import Soak
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.tests.forks import PHASES
from torchtrain.tests.runs import assert_same
from torchtrain.training.events import read_metrics


def test_a_run_that_is_not_interrupted(place, straight):
    assert Checkpoints(straight / "checkpoints").steps() == [4, 6]
    assert {path.name for path in (straight / "exports").iterdir()} == {"step-00000002", "step-00000004"}
    weights = [
        (folder / "model.safetensors").read_bytes()
        for folder in (*(straight / "exports").iterdir(), straight / "model")
    ]
    assert len(set(weights)) == 3
    saves = [e for e in read_metrics(straight / "timing.jsonl") if e["event"] == "save"]
    assert [e["step"] for e in saves] == [2, 4, 6]
    assert all(e["seconds"] > 0 and e["bytes"] > 0 for e in saves)
    assert place.resume("straight") == 0
    assert "is finished; its model is in" in place.last_line("straight")


KILLS = [
    ("folder", 1), ("update", 4), ("event", 4), ("state", 1), ("generators", 3), ("manifest", 2), ("commit", 3),
    ("committed", 3), ("removal", 1), ("export", 1), ("exported", 2), ("evaluation", 4), ("gradient", 5), ("plot", 1),
]  # fmt: skip


@pytest.mark.one_of(3)
@pytest.mark.parametrize(("phase", "nth"), KILLS)
def test_a_run_killed_at_any_phase_is_resumed_bitwise(place, straight, phase, nth):
    name = f"{phase}-{nth}"
    assert place.train(name, at=phase, nth=nth) == -signal.SIGKILL
    if phase == "folder":  # there is no run yet
        assert place.resume(name) == 2
        assert "holds no run;" in place.last_line(name)
        assert place.train(name) == 0
    else:
        assert place.resume(name) == 0, place.log(name)
    assert_same(place.folder / name, straight)


def test_every_phase_is_killed_at():
    elsewhere = {"replacement", "config", "tokenizer", "model", "record"}  # test_{replace,faults,signals}.py
    assert {phase for phase, _ in KILLS} | elsewhere == set(PHASES)


def test_a_run_killed_again_and_again_gets_through(place, straight):
    assert place.train("often", at="gradient", nth=2) == -signal.SIGKILL
    for phase, nth in (("committed", 1), ("gradient", 1), ("state", 1), ("update", 2), ("manifest", 1)):
        assert place.resume("often", at=phase, nth=nth) == -signal.SIGKILL, (phase, place.log("often"))
    assert place.resume("often") == 0
    assert_same(place.folder / "often", straight)
    first = [e for e in read_metrics(place.folder / "often" / "timing.jsonl") if e.get("resumed")]
    assert first
    assert all(e["since_start"] > e["seconds"] for e in first), "time to the first step after resuming"


@pytest.fixture(scope="module")
def soak(place) -> Soak:
    return Soak(place, seed=0)


@pytest.mark.sweep
@pytest.mark.parametrize("number", [6, 3])
def test_a_run_killed_at_random_moments_ends_the_same(soak, number):
    """A small part of benchmarks/soak.py; number 3 is a run of two processes."""
    run = soak.run(number)
    assert run.fault is None
    assert run.kills >= 2
