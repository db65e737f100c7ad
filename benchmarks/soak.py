"""The work of soak.sh: kill tiny runs as they begin a counted system call, alone and as two processes, resume, compare.

The kinds: SIGKILL to the process, to one of two, to both at once; SIGSTOP, and SIGCONT half a second later. Each run is
disturbed up to `PER_RUN` times, then let through. All it leaves must be the same bits: metrics, weights, moments,
generators, exports, and nothing beside them. What was done so far stands in soak.json, from which a later call goes on.
"""

import argparse
import collections
import json
import os
import subprocess
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from anchorline.files import replace_file
from torchtrain.tests.forks import Forks, forks
from torchtrain.tests.kills import Killer, Run
from torchtrain.tests.runs import Place, make_place
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer


def prepare(folder: Path, server: Forks) -> Place:
    """A model, a corpus and a config in a folder."""
    tiny_model().save_pretrained(folder / "source")
    tiny_tokenizer().save_pretrained(folder / "source")
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for i in range(48):
            text = " ".join(str(i * n) for n in range(5 + i % 20))
            file.write(json.dumps({"text": text, "domain": "even" if i % 2 else "odd"}) + "\n")
    return make_place(folder, server, folder / "source", folder / "documents.jsonl")


def summary(seed: int, runs: list[Run], seconds: float) -> dict:
    """What stands in soak.json; `runs` is what a later call goes on from."""
    counts = collections.Counter(place for run in runs for place in run.where)
    return {
        "seed": seed,
        "way": subprocess.run(["strace", "--version"], capture_output=True, text=True).stdout.splitlines()[0],
        "processors": os.cpu_count(),
        "seconds": round(seconds),
        "kills": sum(run.kills for run in runs),
        "stops": sum(run.stops for run in runs),
        "runs": len(runs),
        "runs_of_two_processes": sum(run.layout == "two" for run in runs),
        "runs_that_ended_the_same": sum(run.fault is None for run in runs),
        "faults": {str(number): run.fault for number, run in enumerate(runs) if run.fault is not None},
        "where": dict(counts.most_common()),
        "each": [[run.layout, run.kills, run.stops] for run in runs],
    }


def sweep_saves() -> None:
    """Kill in the threads of saves at each of their calls, of one process and of either of two; report, and end."""
    counts, faults = collections.Counter[str](), 0
    with tempfile.TemporaryDirectory() as name:
        killer = Killer(prepare(Path(name), forks()), 0)
        for layout, rank in (("alone", 0), ("two", 0), ("two", 1)):
            for place in killer.places_of_saves(layout, rank):
                run = killer.run_killed_in_save(layout, *place, rank=rank)
                counts[f"{layout}, rank {rank}: " + ("the same" if run.fault is None else "another")] += 1
                if run.fault is not None:
                    faults += 1
                    print(f"{layout}, rank {rank}, {place}: {run.fault}")
    print(json.dumps(counts, indent=1))
    raise SystemExit(1 if faults else 0)


def main() -> None:
    """Go on from what was done, up to a number of kills or seconds; report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call; then it can be gone on with")
    parser.add_argument("--anew", action="store_true", help="forget what was done")
    parser.add_argument("--saves", action="store_true", help="kill at every call of saves beside the steps, once")
    arguments = parser.parse_args()
    if arguments.saves:
        sweep_saves()
    path = arguments.out / "soak.json"
    runs, before = ([], 0.0) if arguments.anew else _done(path, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        killer = Killer(prepare(Path(name), forks()), arguments.seed)
        while sum(run.kills for run in runs) < arguments.kills and time.monotonic() - started < arguments.seconds:
            runs.append(killer.run(len(runs)))
            report = summary(arguments.seed, runs, before + time.monotonic() - started)
            report["log"] = [asdict(run)["where"] for run in runs]
            replace_file(path, (json.dumps(report, indent=1) + "\n").encode())
            if runs[-1].fault is not None:
                print(f"run {len(runs) - 1}: {runs[-1].fault}")
    report = summary(arguments.seed, runs, before + time.monotonic() - started)
    print(json.dumps({name: value for name, value in report.items() if name != "each"}, indent=1))
    raise SystemExit(1 if report["faults"] else 0)


def _done(path: Path, seed: int) -> tuple[list[Run], float]:
    """The runs of an earlier call with the same seed, and the seconds they took."""
    if not path.exists():
        return [], 0.0
    report = json.loads(path.read_text(encoding="utf-8"))
    if report["seed"] != seed or "each" not in report:
        return [], 0.0
    faults = report["faults"]
    runs = [
        Run(*each, where, faults.get(str(n)))
        for n, (each, where) in enumerate(zip(report["each"], report["log"], strict=True))
    ]
    return runs, report["seconds"]


if __name__ == "__main__":
    main()
