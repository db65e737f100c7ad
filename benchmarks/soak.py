"""Kill tiny runs at random moments, resume them, and compare them with an uninterrupted run.

    python -m benchmarks.soak --kills 1000 --seed 0 --out benchmarks/results   # writes soak.json

A run is one process or two, of which one or both are killed with SIGKILL, several times. In the end its metrics,
weights, moments, generators and exports must be the same bits, with no other file left. Exit code 0: all runs ended
the same.
"""

import argparse
import json
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorline.files import replace_file
from torchtrain.tests.forks import forks
from torchtrain.tests.runs import Place, content, make_place
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

LAYOUTS = {"alone": (), "two": ("distributed.zero_stage=2", "distributed.sequence_parallel=2")}
KILLS_PER_RUN = 5
# Seconds, where only what happens matters.
QUICK = {
    "torchtrain.commands.ending._SECONDS_BEFORE_EXIT": 1.0,
    "torchtrain.commands.ending._SECONDS_BEFORE_MESSAGE": 0.3,
    "torchtrain.distributed.heartbeat.PERIOD": 0.3,
    "torchtrain.distributed.heartbeat.GRACE": 1.0,
}


@dataclass
class Run:
    """One run: its layout, how often it was killed, and how it ended otherwise than the run that was left alone."""

    layout: str
    kills: int = 0
    fault: str | None = None


class Soak:
    """Kills and resumes runs of a place. The seed and a run's number determine its moments, as parts of a whole run."""

    def __init__(self, place: Place, seed: int) -> None:
        self._place, self._seed = place, seed
        self._straight: dict[str, tuple[float, dict[str, Any]]] = {}

    def run(self, number: int) -> Run:
        """Kill the run of this number several times, let it end, compare."""
        draw = random.Random(f"{self._seed}/{number}")
        name, run = f"run-{number}", Run("two" if number % 4 == 3 else "alone")
        if run.layout not in self._straight:
            codes = self._go(f"straight-{run.layout}", run.layout)
            assert not any(codes), codes
            self._straight[run.layout] = (self._place.seconds, content(self._place.folder / f"straight-{run.layout}"))
        seconds, straight = self._straight[run.layout]
        codes, folder = [-signal.SIGKILL], self._place.folder / name
        while run.kills < KILLS_PER_RUN and -signal.SIGKILL in codes:
            one = {"rank": draw.randrange(2), "agent": True} if run.layout == "two" and draw.random() < 0.5 else {}
            codes = self._go(name, run.layout, signal_after=draw.uniform(0, seconds), **one)
            run.kills += -signal.SIGKILL in codes
        if -signal.SIGKILL in codes:
            codes = self._go(name, run.layout)
        left = content(folder) if folder.exists() else {}
        different = sorted(path for path in {*left, *straight} if left.get(path) != straight.get(path))
        others = sorted({path.name for path in folder.parent.glob(f"{name}*")} - {name, f"{name}.log"})
        if any(codes) or different or others or "Traceback" in self._place.log(name):
            run.fault = f"exit codes {codes}; differs in {different}; left {others}; {self._place.log(name)[-1500:]}"
        else:
            shutil.rmtree(folder)
        return run

    def _go(self, name: str, layout: str, **kill: Any) -> list[int]:
        """Resume the run, or begin it where there is none yet; return the exit codes."""
        more = kill | ({"processes": 2, "set": QUICK} if layout == "two" else {})
        if (self._place.folder / name / "run.json").exists():
            codes = self._place.resume(name, **more)
        else:
            codes = self._place.train(name, *LAYOUTS[layout], **more)
        return codes if isinstance(codes, list) else [codes]


def main() -> None:
    """Kill runs until there were so many kills; write a summary after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of soak.json")
    arguments = parser.parse_args()
    started, runs = time.monotonic(), list[Run]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny_model().save_pretrained(folder / "source")
        tiny_tokenizer().save_pretrained(folder / "source")
        texts = [" ".join(str(i * n) for n in range(5 + i % 20)) for i in range(48)]
        records = [{"text": text, "domain": "even" if i % 2 else "odd"} for i, text in enumerate(texts)]
        (folder / "documents.jsonl").write_text("\n".join(map(json.dumps, records)))
        soak = Soak(make_place(folder, forks(), folder / "source", folder / "documents.jsonl"), arguments.seed)
        arguments.out.mkdir(parents=True, exist_ok=True)
        while sum(run.kills for run in runs) < arguments.kills:
            runs.append(soak.run(len(runs)))
            summary = {
                "seconds": round(time.monotonic() - started),
                "kills": sum(run.kills for run in runs),
                "runs": len(runs),
                "runs_of_two_processes": sum(run.layout == "two" for run in runs),
                "faults": {str(number): run.fault for number, run in enumerate(runs) if run.fault is not None},
            }
            replace_file(arguments.out / "soak.json", (json.dumps(summary, indent=1) + "\n").encode())
    print((arguments.out / "soak.json").read_text())
    raise SystemExit(1 if summary["faults"] else 0)


if __name__ == "__main__":
    main()
