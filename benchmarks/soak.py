"""Kill tiny runs as they begin a counted system call, resume them, and compare them with a run that was left alone.

    python -m benchmarks.soak --kills 1000 --seed 0 --out benchmarks/results   # writes soak.json
    python -m benchmarks.soak --saves                                          # every call of threads that save, once

Runs are one process, or two. Signals are SIGKILL to one process or to both, and SIGSTOP with SIGCONT half a second
later. A run may be disturbed several times before it ends. Then its metrics, weights, moments, generators and exports
must be the same bits, with no other file left. Exit code 0: all runs ended the same. strace must be installed.
"""

import argparse
import collections
import json
import tempfile
import time
from pathlib import Path

from anchorline.files import replace_file
from torchtrain.tests.forks import forks
from torchtrain.tests.kills import Killer, Run
from torchtrain.tests.runs import make_place
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer


def main() -> None:
    """Run what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder of soak.json")
    parser.add_argument("--saves", action="store_true", help="kill at every call of the threads that write checkpoints")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        killer = make_killer(Path(name), arguments.seed)
        faults = sweep_saves(killer) if arguments.saves else soak(killer, arguments.kills, arguments.out / "soak.json")
    raise SystemExit(1 if faults else 0)


def make_killer(folder: Path, seed: int) -> Killer:
    """Make a model, a corpus and a config in a folder."""
    tiny_model().save_pretrained(folder / "source")
    tiny_tokenizer().save_pretrained(folder / "source")
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for i in range(48):
            text = " ".join(str(i * n) for n in range(5 + i % 20))
            file.write(json.dumps({"text": text, "domain": "even" if i % 2 else "odd"}) + "\n")
    return Killer(make_place(folder, forks(), folder / "source", folder / "documents.jsonl"), seed)


def soak(killer: Killer, kills: int, file: Path) -> int:
    """Disturb runs until there were so many kills; write a summary after each; return how many runs ended otherwise."""
    started, runs = time.monotonic(), list[Run]()
    while sum(run.kills for run in runs) < kills:
        runs.append(killer.run(len(runs)))
        if runs[-1].fault is not None:
            print(f"run {len(runs) - 1}: {runs[-1].fault}")
        summary = {
            "seconds": round(time.monotonic() - started),
            "kills": sum(run.kills for run in runs),
            "stops": sum(run.stops for run in runs),
            "runs": len(runs),
            "runs_of_two_processes": sum(run.layout == "two" for run in runs),
            "faults": {str(number): run.fault for number, run in enumerate(runs) if run.fault is not None},
            "where": dict(collections.Counter(place for run in runs for place in run.where).most_common()),
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, (json.dumps(summary, indent=1) + "\n").encode())
    print(file.read_text())
    return sum(run.fault is not None for run in runs)


def sweep_saves(killer: Killer) -> int:
    """Kill in the threads of saves at each of their calls; return how many runs ended otherwise."""
    faults = 0
    for layout, rank in (("alone", 0), ("two", 0), ("two", 1)):
        places = killer.places_of_saves(layout, rank)
        runs = [killer.run_killed_in_save(layout, *place, rank=rank) for place in places]
        for place, run in zip(places, runs, strict=True):
            if run.fault is not None:
                faults += 1
                print(f"{layout}, rank {rank}, {place}: {run.fault}")
        print(f"{layout}, rank {rank}: {len(runs)} runs")
    return faults


if __name__ == "__main__":
    main()
