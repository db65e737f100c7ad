"""An input runs in a process of its own, with a time limit; how it ended is right or a fault."""

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fuzz.inputs import Input
from benchmarks.fuzz.kinds import KINDS
from parity_tests.commands import load_apps

GIBIBYTES = 16  # of addresses, so that a size that was not bounded fails and not the machine
MOST_DRAWS = 1000
GOOD_CODES = {0, 1, 2}  # done, a verdict of "no", a mistake


@dataclass(frozen=True)
class Ended:
    """How an input ended."""

    why: str  # empty if it ended as it should
    said: str
    seconds: float

    @property
    def good(self) -> bool:
        """Whether it ended as it should."""
        return not self.why


def run(given: Input, folder: Path, seconds: float) -> Ended:
    """Run a command in a process of its own, which dies with all it started after so many seconds."""
    before, started, log = set(os.listdir(folder)), time.monotonic(), folder.parent / "said"
    child = os.fork()
    if not child:
        _be_the_command(given, folder, log)
    code = None
    while code is None and time.monotonic() - started < seconds:
        ended, status = os.waitpid(child, os.WNOHANG)
        code = os.waitstatus_to_exitcode(status) if ended else None
        if code is None:
            time.sleep(0.01)
    if code is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    took, said = time.monotonic() - started, log.read_text(errors="backslashreplace")
    if code is None:
        return Ended(f"hangs: no end after {seconds:g} s", said, took)
    return Ended(_fault(given, code, said, made=set(os.listdir(folder)) - before), said, took)


def _fault(given: Input, code: int, said: str, made: set[str]) -> str:
    """Say what is wrong with how a command ended; empty if nothing is."""
    if code not in GOOD_CODES:
        return f"exit code {code}"
    if "Traceback (most recent call last)" in said:
        return "a traceback"
    told = "Usage" in said or any(line.startswith(f"{given.command}: ") for line in said.splitlines())
    if code == 2 and not told:
        return "exit code 2 without a line that says why"
    if given.made and made != ({given.made} if code == 0 else set()):
        return f"exit code {code}, and it left {', '.join(sorted(made)) or 'nothing'}"
    if len(said) > 20_000:
        return f"{len(said):,} characters of output"
    return ""


def _be_the_command(given: Input, folder: Path, log: Path) -> None:
    code = 99
    os.setsid()  # so that what it starts ends with it
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.chdir(folder)
        os.environ.update(given.environment)
        limit = GIBIBYTES * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
        try:
            load_apps()[given.command](args=given.arguments)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 0 if leave.code is None else 98
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def try_one(
    seed: int, number: int, kinds: Sequence[str], valid: Path, seconds: float, quick: bool
) -> tuple[Input, Ended, Path]:
    """Draw an input from (seed, number), the kinds taking turns, and run it in a copy of the valid files.

    Args:
        seed: the same seed, number and kinds give the same input.
        number: of the input.
        kinds: names in KINDS.
        valid: the folder that is copied.
        seconds: the input may take.
        quick: draw again until a command neither trains nor compiles.

    Returns:
        The input, how it ended, and the folder in which it ran.
    """
    drawn, kind = random.Random(f"{seed} {number}"), kinds[number % len(kinds)]
    for _ in range(MOST_DRAWS):
        # Deep enough that what climbs out of it stays in what is thrown away.
        folder = Path(tempfile.mkdtemp(dir=valid.parent)) / "a" / "b" / "work"
        shutil.copytree(valid, folder, symlinks=True, copy_function=_copy)
        given = KINDS[kind](drawn, folder)
        given.about = f"{kind}: {given.about}"
        if given.quick or not quick:
            return given, run(given, folder, seconds), folder
        shutil.rmtree(folder.parents[2])
    raise AssertionError(f"{kind}: none of {MOST_DRAWS} inputs is quick")


def _copy(source: str, target: str) -> None:
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
    elif Path(source).is_fifo():
        os.mkfifo(target)
    else:
        shutil.copy2(source, target)
