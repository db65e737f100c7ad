"""What a person is told who waits for a run: how long it takes, how far it is, and what Ctrl-C does."""

import io
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from torchtrain.config import load_config
from torchtrain.run import report
from torchtrain.run.recipe import train
from torchtrain.training.held_out import HeldOut

# One operation of many minutes, in which Python handles no signal. A shell may have switched Ctrl-C off for a test.
LONG = """
import hashlib, signal
from torchtrain.run.termination import answer_interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)
with answer_interrupts(lambda: print("answered", flush=True), lambda: print("ending", flush=True)):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2 * 10**9)
"""


def test_ctrl_c_is_answered_inside_a_long_operation_and_a_second_one_ends_it():
    with subprocess.Popen([sys.executable, "-c", LONG], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in ("ready", "answered"):
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.SIGINT)
        assert process.communicate()[0] == "ending\n"
        assert process.returncode == 130


@pytest.mark.parametrize("terminal", [False, True])
def test_a_long_step_shows_how_far_it_is(monkeypatch, terminal):
    monkeypatch.setattr(report, "_SECONDS_WITHOUT_A_LINE", 0.01)
    shown = io.StringIO()
    with report.Display(Console(file=shown, force_terminal=terminal, width=200)) as display:
        advance = display.task("training", 2)
        advance("loss 2.5")
        display.note_part("micro-batch 3 of 8")
        said = r"micro-batch 3 of 8" if terminal else r"training 2/2 · micro-batch 3 of 8 · \d+ s so far"
        while not re.search(said, shown.getvalue()):
            time.sleep(0.01)
        advance("loss 2.4")
        assert "loss 2.4" in shown.getvalue() or terminal


def test_the_time_of_the_run_is_estimated_before_the_first_step(tree, write_config):
    shown = io.StringIO()
    train(load_config(write_config(tree), ["train.steps=3"]), console=Console(file=shown, width=200))
    said = shown.getvalue()
    assert re.search(
        r"estimate  \d:\d\d:\d\d from here at least: 3 steps of \d+ s or more, then \d+ s for held-out", said
    )
    assert said.index("estimate ") < said.index("training 1/3")


def test_the_change_of_the_held_out_loss_has_an_interval():
    before, after = (HeldOut(["a"], 64) for _ in range(2))
    shown = io.StringIO()
    for held_out, blocks in ((before, [2.0, 3.0, 2.5]), (after, [1.9, 2.8, 2.3])):
        held_out.blocks = blocks
        held_out.overall.total, held_out.overall.tokens = sum(blocks), 3
    Console(file=shown, width=120).print(report.final_table(before, after, 10, 1.0))
    # Student's: -1/6 and 4.303 standard errors of sqrt(1/300) / sqrt(3) on both sides.
    assert "change -0.3101 to -0.0232 (95% interval over blocks of 256 tokens)" in " ".join(shown.getvalue().split())
