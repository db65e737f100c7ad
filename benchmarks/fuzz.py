"""Damaged inputs for every command: a user's mistake gives one line, never a traceback, never a hang.

    python -m benchmarks.fuzz                        # 3,000 inputs
    python -m benchmarks.fuzz --seed 7 --count 200   # others, and fewer

Hypothesis draws the inputs, and shrinks an input that shows a fault. The valid files and the kinds of damage
are in `benchmarks.fuzz_inputs`.
"""

import argparse
import importlib
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import hypothesis
from hypothesis import strategies as st

from benchmarks.fuzz_inputs import KINDS, QUICK, Input, make_files
from parity_tests.commands import load_apps

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
IMPORTED = (
    *("transformers", "jaxref.storage.checkpoint", "ropestudy.run", "parity_tests.check", "parity_tests.gate.run"),
    *("torchtrain.run.recipe", "torchtrain.planning.budget", "torchtrain.run.status", "torchtrain.run.verify"),
)
SECONDS = 120.0  # for one input
BYTES = 16 * 2**30  # of addresses, so that a size without a bound fails and the machine does not


def main() -> None:
    """Run the inputs; raise an error for one that shows a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--quick", action="store_true", help="only commands that neither train nor compile")
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    import torch

    torch.set_num_threads(1)
    load_apps()
    for name in IMPORTED:  # once, for every process that is forked; none of them may start threads
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        valid = Path(name, "valid")
        valid.mkdir()

        def run_valid(command: list[str]) -> None:
            fault, output = run((command, {}, ""), valid)
            assert not fault, output

        make_files(valid, run_valid)

        @hypothesis.seed(given.seed)
        @hypothesis.settings(
            max_examples=given.count, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(st.sampled_from(list(KINDS)), st.randoms(use_true_random=False))
        def check(kind: str, draw: random.Random) -> None:
            with tempfile.TemporaryDirectory(dir=name) as own:
                # Deep enough that a path with `..` stays in the temporary folder.
                folder = Path(own) / "a" / "b" / "work"
                shutil.copytree(valid, folder, symlinks=True, copy_function=_copy)
                drawn = KINDS[kind](draw, folder)
                hypothesis.assume(not given.quick or tuple(drawn[0][:2]) in QUICK)
                fault, output = run(drawn, folder)
                assert not fault, f"{kind}: {fault}: {drawn[2]}; {drawn[1]} {drawn[0]!r:.300}\n{output[-2000:]}"

        check()
    print(f"{given.count} inputs, no fault")


def _copy(source: str, target: str) -> None:
    if Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target, follow_symlinks=False)


def run(drawn: Input, folder: Path) -> tuple[str, str]:
    """Run a command in a process of its own; return what is wrong with how it ended, or nothing, and its output."""
    command, environment, _ = drawn
    started, log = time.monotonic(), folder.parent / "output"
    child = os.fork()
    if not child:
        _be_the_command(command, environment, folder, log)
    code = None
    while code is None and time.monotonic() - started < SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.01)
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    output = log.read_text(errors="backslashreplace") if log.exists() else ""
    explained = "Usage" in output or any(line.startswith(f"{command[0]}: ") for line in output.splitlines())
    faults = {
        f"hangs: no end after {SECONDS:g} s": code is None,
        f"exit code {code}": code not in (None, 0, 1, 2),
        "a traceback": "Traceback (most recent call last)" in output,
        "exit code 2 without a line that says why": code == 2 and not explained,
        f"{len(output):,} characters of output": len(output) > 20_000,
    }
    return next((fault for fault, shown in faults.items() if shown), ""), output


def _be_the_command(command: list[str], environment: dict[str, str], folder: Path, log: Path) -> None:
    code = 99
    os.setsid()  # so that the processes that it starts end with it
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(folder)
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
        try:
            load_apps()[command[0]](args=command[1:])
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 98
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
