"""Runs that are killed or stopped as they begin a counted system call, resumed, and compared with a run that was left
alone.

strace counts and injects: every write, rename, flush or removal of the process's main thread, or of the thread that
writes a checkpoint beside the steps, is a place where it can end, none in between is. A run's disturbances are drawn
from its seed and number alone, so that any of them can be run again.
"""

import itertools
import random
import shutil
import signal
from dataclasses import dataclass, field
from typing import Any

from torchtrain.tests.runs import Place, content

# What changes files, and so what is left of them when the process ends there.
CALLS = (
    "openat",
    "write",
    "fsync",
    "rename",
    "unlink",
    "unlinkat",
    "mkdir",
    "rmdir",
    "ftruncate",
    "truncate",
    "chmod",
    "close",
)
LAYOUTS = {"alone": (), "two": ("distributed.zero_stage=2", "distributed.sequence_parallel=2")}
# Seconds, where only what happens matters.
QUICK = {
    "torchtrain.commands.ending._SECONDS_BEFORE_EXIT": 1.0,
    "torchtrain.commands.ending._SECONDS_BEFORE_MESSAGE": 0.3,
    "torchtrain.distributed.heartbeat.PERIOD": 0.3,
    "torchtrain.distributed.heartbeat.GRACE": 1.0,
}
# Which saves of a process are disturbed in their own thread: the third of a run of six steps removes an old one.
SAVES = (1, 3)
PER_RUN = 5
PAUSE = 0.5  # seconds that a stopped process stands still
CAN = shutil.which("strace") is not None


@dataclass
class Run:
    """What came of one run."""

    layout: str
    kills: int = 0
    stops: int = 0
    where: list[str] = field(default_factory=list)  # the system call of each
    fault: str | None = None  # how it ended differently


class Killer:
    """Disturbs runs of a place.

    Args:
        place: where they are; its runs are tiny.
        seed: of what is drawn.
    """

    def __init__(self, place: Place, seed: int) -> None:
        self._place, self._seed = place, seed
        self._straight: dict[str, dict[str, Any]] = {}
        self._counts: dict[str, dict[str, int]] = {}
        self._of_save: dict[tuple[str, int, int], dict[str, int]] = {}

    def _learn(self, layout: str) -> None:
        """Run undisturbed: what it leaves, and how often it makes each call."""
        name = f"straight-{layout}"
        more = self._processes(layout)
        assert self._place.train(f"warm-{layout}", *LAYOUTS[layout], **more) in (0, [0, 0])  # makes the corpus
        codes = self._place.train(name, *LAYOUTS[layout], **more, trace={"calls": CALLS})
        assert codes in (0, [0, 0]), self._place.log(name)
        self._straight[layout] = content(self._place.folder / name)
        self._counts[layout] = {call: count for call, count in self._place.answer["counts"].items() if call in CALLS}
        for save, rank in itertools.product(SAVES, range(more.get("processes", 1))):
            name, trace = f"learn-{layout}-{save}-{rank}", {"calls": CALLS, "save": save, "rank": rank}
            codes = self._place.train(name, *LAYOUTS[layout], **more, trace=trace)
            assert codes in (0, [0, 0]), self._place.log(name)
            self._of_save[layout, save, rank] = dict(self._place.answer["counts"])

    def run(self, number: int, per_run: int = PER_RUN) -> Run:
        """Disturb the run of this number, let it end, compare."""
        draw = random.Random(f"{self._seed}/{number}")
        layout = "two" if number % 4 == 3 else "alone"
        if layout not in self._straight:
            self._learn(layout)
        name, run = f"run-{number}", Run(layout)
        for _ in range(per_run):
            save, rank = draw.choice((0, *SAVES)), draw.randrange(2) if layout == "two" else 0
            counts = self._of_save[layout, save, rank] if save else self._counts[layout]
            call = draw.choice(sorted(counts))
            most = max(1, counts[call] // (1 if save else draw.choice((1, 2, 4))))  # a run that was resumed makes fewer
            trace: dict[str, Any] = {"call": call, "when": draw.randint(1, most), "pause": PAUSE}
            trace["signal"] = draw.choice([signal.SIGKILL] * 4 + [signal.SIGSTOP])
            if save:
                trace["save"] = save
            if layout == "two":
                trace |= {"rank": rank, "group": draw.random() < 0.5}
            codes = self._go(name, layout, trace=trace)
            beside = " of a save beside" if save else ""
            if self._place.answer["stopped"]:
                run.stops += 1
                run.where.append(f"stopped at {call}{beside}")
            if -signal.SIGKILL in codes:
                run.kills += 1
                run.where.append(f"killed at {call}{beside}")
            elif codes == [0] * len(codes):
                break
            else:
                run.fault = f"{trace}: exit codes {codes}: {self._place.log(name)[-1500:]}"
                return run
        self._end(name, run)
        return run

    def places_of_saves(self, layout: str, rank: int = 0) -> list[tuple[int, str, int]]:
        """Return (save, call, number of the call) of everywhere that a rank's thread of a save can end."""
        if layout not in self._straight:
            self._learn(layout)
        of_saves = ((save, call, count) for save in SAVES for call, count in self._of_save[layout, save, rank].items())
        return [(save, call, when) for save, call, count in sorted(of_saves) for when in range(1, count + 1)]

    def run_killed_in_save(self, layout: str, save: int, call: str, when: int, rank: int = 0) -> Run:
        """Kill a run in the thread of a save, let it end, compare."""
        name, run = f"{layout}-{rank}-{save}-{call}-{when:03}", Run(layout)
        codes = self._go(name, layout, trace={"save": save, "call": call, "when": when, "rank": rank})
        if codes[rank] != -signal.SIGKILL:
            run.fault = f"it was not killed: exit codes {codes}: {self._place.log(name)[-1500:]}"
            return run
        run.kills, run.where = 1, [f"killed at {call} of a save beside"]
        self._end(name, run)
        return run

    def _end(self, name: str, run: Run) -> None:
        """Let a run that was disturbed end, and compare what it leaves."""
        layout, folder = run.layout, self._place.folder / name
        if (codes := self._go(name, layout)) != [0] * len(codes):
            run.fault = f"exit codes {codes}: {self._place.log(name)[-1500:]}"
            return
        mine, theirs = content(folder), self._straight[layout]
        other = sorted(path for path in {*mine, *theirs} if mine.get(path) != theirs.get(path))
        beside = [path.name for path in folder.parent.glob(f"{name}*") if path.name not in (name, f"{name}.log")]
        if other or beside or "Traceback" in self._place.log(name):
            run.fault = f"differs in {other}; beside it {beside}; {self._place.log(name)[-1500:]}"
        else:
            shutil.rmtree(folder)

    def _go(self, name: str, layout: str, **more: Any) -> list[int]:
        """Resume the run, or begin it where there is none yet; return the exit codes."""
        more |= self._processes(layout)
        if (self._place.folder / name / "run.json").exists():
            codes = self._place.resume(name, **more)
        else:
            codes = self._place.train(name, *LAYOUTS[layout], **more)
        return codes if isinstance(codes, list) else [codes]

    @staticmethod
    def _processes(layout: str) -> dict[str, Any]:
        return {"processes": 2, "set": QUICK} if layout == "two" else {}
