"""What can go wrong with one process of several, each fault injected: death, hanging, signals, disks, missing files."""

import errno
import signal
from pathlib import Path
from typing import Any

import pytest

from torchtrain.checkpoint.store import Checkpoints
from torchtrain.tests.run_fixtures import WAITING
from torchtrain.tests.runs import assert_same
from torchtrain.training.events import read_metrics

# Seconds, where only what happens matters.
QUICK = {
    "torchtrain.commands.ending._SECONDS_BEFORE_EXIT": 1.0,
    "torchtrain.commands.ending._SECONDS_BEFORE_MESSAGE": 0.3,
    "torchtrain.distributed.heartbeat.PERIOD": 0.3,
    "torchtrain.distributed.heartbeat.GRACE": 1.0,
}
TWO = ("distributed.zero_stage=2", "distributed.sequence_parallel=2")


@pytest.fixture(scope="module")
def straight_on_two(place) -> Path:
    assert place.train("straight-on-two", *TWO, processes=2) == [0, 0], place.log("straight-on-two")
    return place.folder / "straight-on-two"


def test_a_dead_process_stops_the_other_and_the_run_goes_on(place, straight_on_two):
    codes = place.train("dead", *TWO, processes=2, at="gradient", nth=5, rank=1, set=QUICK, agent=True)
    assert codes == [1, -signal.SIGKILL], "though torchrun sends it SIGTERM"
    assert place.last_line("dead") == "torchtrain: rank 0: stopped, because another process of the run is gone"
    assert place.resume("dead", processes=2) == [0, 0], place.log("dead")
    assert_same(place.folder / "dead", straight_on_two)


def test_a_process_that_fails_alone_reports_alone(place):
    """Its traceback is what matters; the other, which waits for it in a collective, leaves in silence."""
    fault: dict[str, Any] = {"at": "gradient", "nth": 2, "rank": 1, "error": "CUDA out of memory"}
    assert place.train("fails", *TWO, processes=2, set=QUICK, **fault) == [1, 70]
    assert "\nRuntimeError: CUDA out of memory\n" in place.log("fails")
    told = [line for line in place.log("fails").splitlines() if line.startswith("torchtrain: ")]
    assert len(told) == 1
    assert "bug" in told[0]


def test_a_full_disk_of_one_process_is_one_line(place):
    fault: dict[str, Any] = {"at": "state", "nth": 1, "rank": 1, "error": errno.ENOSPC}
    assert place.train("full-one", *TWO, processes=2, set=QUICK, agent=True, **fault)[1] == 2
    told = [line for line in place.log("full-one").splitlines() if line.startswith("torchtrain: ")]
    (line,) = told
    assert line.startswith(
        f"torchtrain: rank 1: {place.folder}/full-one/checkpoints/step-00000002: the checkpoint could not"
    )
    assert "rank 1: no space left on device (a file); there is no earlier one" in line


def test_nodes_that_do_not_share_the_folder(place):
    """Each process has its own, and sees no run of rank 0's in it."""
    constants = QUICK | {"torchtrain.run.folder._ATTEMPTS": 1}
    codes = place.train("nodes", f"run.folder={place.folder}/nodes-{{rank}}", processes=2, set=constants)
    assert codes == [2, 2]
    (line,) = [line for line in place.log("nodes").splitlines() if line.startswith("torchtrain: ")]
    assert line.startswith(f"torchtrain: rank 1: run.folder {place.folder}/nodes-1: ")
    assert line.endswith("does not see the run; run.folder must be on a disk that all nodes share")


def test_a_process_that_hangs_stops_the_other(place):
    """It lives and does nothing: no connection breaks, and a collective alone would wait for half an hour."""
    constants = QUICK | {"torchtrain.distributed.heartbeat.PATIENCE": 6.0}  # a busy machine may hold one up for 2
    stop: dict[str, Any] = {"at": "gradient", "nth": 5, "rank": 1, "signal": signal.SIGSTOP}
    codes = place.train("hangs", *TWO, processes=2, set=constants, **stop)
    assert codes == [1, -signal.SIGKILL]
    assert place.last_line("hangs") == "torchtrain: rank 0: stopped, because rank 1 has given no sign of life for 6 s"


@pytest.mark.sweep
def test_a_process_killed_while_both_save(place, straight_on_two):
    codes = place.train("two-state", *TWO, processes=2, at="state", nth=2, rank=1, set=QUICK)
    assert codes == [1, -signal.SIGKILL]
    assert Checkpoints(place.folder / "two-state" / "checkpoints").steps() == [2]
    assert place.resume("two-state", processes=2) == [0, 0]
    assert_same(place.folder / "two-state", straight_on_two)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("name", "number", "code", "ranks", "long", "saved"),
    [
        ("SIGTERM", signal.SIGTERM, 143, {"rank": 1}, False, 3),
        ("SIGTERM", signal.SIGTERM, 143, {"rank": 1}, True, 2),
        ("Ctrl-C", signal.SIGINT, 130, {}, False, 3),
        ("Ctrl-C", signal.SIGINT, 130, {"rank": 0}, True, 2),
    ],
)
def test_a_signal_to_one_or_both_of_two_processes_saves_on_both(
    place, straight_on_two, name, number, code, ranks, long, saved
):
    run = f"two-{name}-{long}"
    constants = {"set": {"torchtrain.run.recipe._LONG": 0.0 if long else 1e9}}
    codes = place.train(run, *TWO, processes=2, at="gradient", nth=3, signal=number, **ranks, **constants)
    assert codes == [code, code], place.log(run)
    told = [line for line in place.log(run).splitlines() if line.startswith("torchtrain:")]
    assert len(told) == 1
    assert f"stopped by {name} after step {saved}, which is saved" in told[0]
    assert Checkpoints(place.folder / run / "checkpoints").open(saved) is not None
    assert place.resume(run, processes=2) == [0, 0], place.log(run)
    assert_same(place.folder / run, straight_on_two)


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("ranks", "agent", "number", "code", "said"),
    [
        ({"rank": 1}, False, signal.SIGTERM, 143, "stopped by SIGTERM"),
        ({"rank": 0}, True, signal.SIGTERM, 143, "stopped by SIGTERM"),
        ({}, True, signal.SIGTERM, 143, "stopped by SIGTERM"),
        ({}, True, signal.SIGINT, 130, "interrupted"),
    ],
)
def test_a_signal_outside_a_step_is_told_by_one(place, straight_on_two, ranks, agent, number, code, said):
    """Whichever process it comes to, and whether torchrun then sends SIGTERM to the other as well or not."""
    name = f"outside-{ranks.get('rank')}-{agent}-{code}"
    kill: dict[str, Any] = {"at": "evaluation", "nth": 1, "signal": number, **ranks}
    codes = place.train(name, *TWO, processes=2, set=QUICK, agent=agent, **kill)
    assert codes == [code, code], place.log(name)
    (line,) = [line for line in place.log(name).splitlines() if line.startswith("torchtrain: ")]
    advice = f"{said}; to resume from the last checkpoint: torchtrain resume {place.folder / name}"
    assert line in (f"torchtrain: {advice}", f"torchtrain: rank 1: {advice}")
    if "rank" in ranks and not agent:
        assert ("rank 1" in line) == (ranks["rank"] == 1)


ALONE = ("distributed.zero_stage=0", "distributed.sequence_parallel=1")


def test_a_missing_file_of_a_rank_and_another_number_of_processes(place, straight_on_two):
    """From two processes to one and back to two, otherwise spread: the rows stay the same."""
    assert place.train("moved", *TWO, WAITING, processes=2, at="gradient", nth=3) == [-signal.SIGKILL] * 2
    lost = place.folder / "moved" / "checkpoints" / "step-00000002" / "state-00001-000.safetensors"
    kept = lost.read_bytes()
    lost.unlink()
    for processes, expected in ((2, [2, 2]), (1, 2)):
        spread = ALONE if processes == 1 else ()
        assert place.resume("moved", *spread, processes=processes, set=QUICK) == expected
        told = [line for line in place.log("moved").splitlines() if line.startswith("torchtrain:")][-1]
        assert f"{lost}: is missing; there is no good one: torchtrain resume" in told
    lost.write_bytes(kept)
    assert place.resume("moved", *ALONE, at="gradient", nth=3) == -signal.SIGKILL
    assert Checkpoints(place.folder / "moved" / "checkpoints").steps() == [2, 4]
    told = (
        "warning   the last digits may differ from those of an uninterrupted run: processes 2 then, 1 now, "
        "sequence_parallel"
    )
    assert told in place.log("moved")
    spread = ("distributed.zero_stage=3", "distributed.sequence_parallel=1")
    assert place.resume("moved", *spread, processes=2) == [0, 0]
    mine, theirs = (read_metrics(run / "metrics.jsonl") for run in (place.folder / "moved", straight_on_two))
    for name in ("event", "step", "tokens_seen", "labelled_tokens", "live_pairs", "flops", "learning_rate"):
        assert [e.get(name) for e in mine] == [e.get(name) for e in theirs], name
    assert [e["loss"] for e in mine[:3]] == [e["loss"] for e in theirs[:3]]
