"""Damaged inputs for every command: a user's file or option gives one line, never a traceback, never a hang.

python -m benchmarks.fuzz                        # 3,000 inputs from seed 0
python -m benchmarks.fuzz --seed 7 --first 1200  # from another seed, from input 1,200 on
python -m benchmarks.fuzz --seed 7 --only 1234   # one input again, its folder kept
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

from benchmarks.fuzz.inputs import KINDS, QUICK, Input, make_files
from parity_tests.commands import load_apps

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "120", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
IMPORTED = (
    *("transformers", "jaxref.convert", "ropestudy.run", "parity_tests.check", "parity_tests.gate.run"),
    *("torchtrain.run.recipe", "torchtrain.planning.budget", "torchtrain.run.status", "torchtrain.run.verify"),
)
GIB = 16  # of addresses, so that a size without a bound fails and the machine does not


def main() -> int:
    """Run the inputs; return 1 if one of them found a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--only", type=int, help="number of a single input, whose folder is kept")
    parser.add_argument("--seconds", type=float, default=120.0, help="for one input")
    parser.add_argument("--quick", action="store_true", help="only commands that neither train nor compile")
    given = parser.parse_args()
    os.environ |= ENVIRONMENT
    import torch

    torch.set_num_threads(1)
    load_apps()
    for name in IMPORTED:  # once, for every process that is forked; none of them may start threads
        importlib.import_module(name)
    top = Path(tempfile.mkdtemp(prefix="fuzz-"))
    (top / "valid").mkdir()

    def run_valid(command: list[str]) -> None:
        fault, said = run((command, {}, ""), top / "valid", 1200.0)
        assert not fault, said

    make_files(top / "valid", run_valid)
    faults, numbers = 0, range(given.first, given.first + given.count) if given.only is None else [given.only]
    for number in numbers:
        kind = list(KINDS)[number % len(KINDS)]
        drawn, folder = draw_input(random.Random(f"{given.seed} {number}"), kind, top / "valid", given.quick)
        fault, said = run(drawn, folder, given.seconds)
        faults += bool(fault)
        if fault or given.only is not None:
            print(f"{number}, {kind}: {fault or 'right'}\n  {drawn[2]}\n  {drawn[1]} {drawn[0]!r:.300}")
            print("\n".join(f"    {line[:300]}" for line in said.splitlines()[-8:]), flush=True)
        if given.only is not None:
            print(f"  kept in {folder}")
            return int(bool(fault))
        shutil.rmtree(folder.parents[2])
    shutil.rmtree(top)
    print(f"{len(numbers)} inputs, {faults} faults; again: --seed {given.seed}{' --quick' * given.quick} --only NUMBER")
    return int(faults > 0)


def draw_input(draw: random.Random, kind: str, valid: Path, quick: bool) -> tuple[Input, Path]:
    """Draw an input of a kind; return it and the copy of the valid files that it runs in."""
    while True:
        # Deep enough that what climbs out of it stays in what is thrown away.
        folder = Path(tempfile.mkdtemp(dir=valid.parent)) / "a" / "b" / "work"
        shutil.copytree(valid, folder, symlinks=True, copy_function=_copy)
        drawn = KINDS[kind](draw, folder)
        if not quick or tuple(drawn[0][:2]) in QUICK:
            return drawn, folder
        shutil.rmtree(folder.parents[2])


def _copy(source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target)


def run(drawn: Input, folder: Path, seconds: float) -> tuple[str, str]:
    """Run a command in a process of its own; return what is wrong with how it ended, or nothing, and its output."""
    command, environment, _ = drawn
    started, log = time.monotonic(), folder.parent / "said"
    child = os.fork()
    if not child:
        _be_the_command(command, environment, folder, log)
    code = None
    while code is None and time.monotonic() - started < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        time.sleep(0.01)
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = log.read_text(errors="backslashreplace") if log.exists() else ""
    explained = "Usage" in said or any(line.startswith(f"{command[0]}: ") for line in said.splitlines())
    faults = {
        f"hangs: no end after {seconds:g} s": code is None,
        f"exit code {code}": code not in (None, 0, 1, 2),
        "a traceback": "Traceback (most recent call last)" in said,
        "exit code 2 without a line that says why": code == 2 and not explained,
        f"{len(said):,} characters of output": len(said) > 20_000,
    }
    return next((fault for fault, found in faults.items() if found), ""), said


def _be_the_command(command: list[str], environment: dict[str, str], folder: Path, log: Path) -> None:
    code = 99
    os.setsid()  # so that what it starts ends with it
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(folder)
        os.environ.update(environment)
        resource.setrlimit(resource.RLIMIT_AS, (GIB * 2**30, GIB * 2**30))
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
    sys.exit(main())
