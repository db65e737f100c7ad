"""Saves beside the steps: training goes on, the bits are those of a save that it waits for, and however a run ends
meanwhile, what was begun is whole or not there.
"""

import os
import signal
import threading

import pytest

from torchtrain.checkpoint import fragments
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import load_config
from torchtrain.run import recipe
from torchtrain.tests.run_fixtures import QUIET
from torchtrain.tests.runs import assert_same
from torchtrain.tests.tiny import refused
from torchtrain.training import step
from torchtrain.training.events import read_metrics

LONG = 300.0  # seconds after which a thread that waits for what does not come goes on, and the test fails


class Order:
    """What happens in a run, in order: `step N` as a step's gradients are made, `begin N` and `end N` of a save.

    hold: saves that begin to write once something else has happened.
    """

    def __init__(self, monkeypatch, hold: dict[str, str]) -> None:
        self.seen: list[str] = []
        self.threads: set[str] = set()
        self._change = threading.Condition()
        self._steps = 0
        real_accumulate, real_save, real_write = step.accumulate, Checkpoints.save, fragments.write

        def accumulate(*arguments):
            self._steps += 1
            found = real_accumulate(*arguments)
            self.note(f"step {self._steps}")
            return found

        def save(checkpoints, part, manifest, number, *rest):
            self.note(f"begin {number}")
            self._number = number
            size = real_save(checkpoints, part, manifest, number, *rest)
            self.note(f"end {number}")
            return size

        def write(*arguments):
            self.threads.add(threading.current_thread().name)
            if (event := hold.get(f"begin {self._number}")) is not None:
                self.wait(event)
            return real_write(*arguments)

        monkeypatch.setattr(step, "accumulate", accumulate)
        monkeypatch.setattr(Checkpoints, "save", save)
        monkeypatch.setattr(fragments, "write", write)

    def note(self, event: str) -> None:
        with self._change:
            self.seen.append(event)
            self._change.notify_all()

    def wait(self, event: str) -> None:
        with self._change:
            self._change.wait_for(lambda: event in self.seen, LONG)


def test_the_same_bits(place, straight):
    assert place.train("blocking", "save.asynchronous=false") == 0
    assert_same(place.folder / "blocking", straight)
    for run, beside in ((place.folder / "blocking", False), (straight, True)):
        saves = [e for e in read_metrics(run / "timing.jsonl") if e["event"] == "save"]
        assert [e["step"] for e in saves] == [2, 4, 6]
        assert all(0 < e["held"] <= e["seconds"] and (e["held"] < e["seconds"]) == beside for e in saves)


def test_training_goes_on_and_what_is_written_is_of_before(place, tmp_path, monkeypatch):
    """The writer of step 2 is held until step 4 has its gradients, so that weights and moments were updated once since;
    that of step 4 until the last step has. One save at a time: that of step 6 waits for it.
    """
    for name in ("warm", "blocking", "beside"):  # the first run of a process imports what draws random numbers
        overrides = [f"run.folder={tmp_path / name}", f"save.asynchronous={str(name == 'beside').lower()}"]
        config = load_config(place.config, [*overrides, "save.last=1"])
        order = Order(monkeypatch, hold={"begin 2": "step 4", "begin 4": "step 6"} if name == "beside" else {})
        recipe.train(config, console=QUIET)
        monkeypatch.undo()
    assert order.seen == [
        *("step 1", "step 2", "begin 2", "step 3", "step 4", "end 2"),
        *("begin 4", "step 5", "step 6", "end 4", "begin 6", "end 6"),
    ]
    assert order.threads == {"background"}
    assert_same(tmp_path / "beside", tmp_path / "blocking")


def test_a_write_that_fails_ends_the_run_before_the_next_save(run, monkeypatch):
    """It is held until step 3 is made; at the latest the save of step 4 would tell."""
    train, folder = run
    order = Order(monkeypatch, hold={"begin 2": "step 3"})
    real = os.open

    def full(path, flags, mode=0o777, *, dir_fd=None):
        there = "step-00000002.partial/state" in str(path) and flags & os.O_WRONLY
        return real("/dev/full", os.O_WRONLY) if there else real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", full)
    assert refused(train) == (
        f"{folder}/checkpoints/step-00000002: the checkpoint could not be written: no space left on device; there is"
        f" no earlier one; correct that, then: torchtrain resume {folder}"
    )
    assert "begin 4" not in order.seen
    assert list((folder / "checkpoints").iterdir()) == []


# --- signals, in processes --------------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_ctrl_c_of_two_processes_while_they_save(place):
    two = ("distributed.zero_stage=2", "distributed.sequence_parallel=2")
    codes = place.train("interrupt-two", *two, processes=2, at="state", nth=1, signal=signal.SIGINT)
    assert codes == [130, 130], place.log("interrupt-two")
    assert Checkpoints(place.folder / "interrupt-two" / "checkpoints").open(2) is not None
