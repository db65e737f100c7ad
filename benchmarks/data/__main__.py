"""Measure all of it in turn, write what came out as JSON, and print its tables for docs/benchmarks.md.

    make rivals
    .venv-rivals/bin/python -m benchmarks.data --work FOLDER

Each measurement is a process of its own on one core; engines follow one another within each repeat, so that what else
the machine does meets all of them. What was measured lies in FOLDER/measured.jsonl and is not measured again.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from anchorline.files import save
from benchmarks.data import balance, packing, page, reading, tokenising

ROOT = Path(__file__).resolve().parents[2]
CASES = {"tokenising": tokenising, "packing": packing, "reading": reading}
PACKAGES = ("tokenizers", "datatrove", "datasets", "trl", "mosaicml-streaming", "numpy", "transformers")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


def main() -> None:
    """Measure, or go on measuring; then write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="where inputs and measurements lie")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "data.json")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    measured = _measure(arguments.work, arguments.repeats)
    report = {
        "environment": _environment(),
        "repeats": arguments.repeats,
        "measured": measured,
        "balance": balance.simulate(arguments.work),
    }
    save(arguments.out, (json.dumps(report, indent=1) + "\n").encode())
    print(page.tables_of(report))


def _measure(work: Path, repeats: int) -> list[dict[str, Any]]:
    log = work / "measured.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    known = {(one["case"], one["kind"], one["repeat"], one["engine"]) for one in done}
    for case, module in CASES.items():
        for kind in module.KINDS:
            for repeat in range(repeats):
                for engine in module.ENGINES:
                    if (case, kind, repeat, engine) in known:
                        continue
                    place = {"case": case, "kind": kind, "repeat": repeat, "engine": engine}
                    found = place | _run(case, engine, kind, work)
                    print(json.dumps(found), flush=True)
                    done.append(found)
                    with log.open("a") as file:
                        file.write(json.dumps(found) + "\n")
    return done


def _run(case: str, engine: str, kind: str, work: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.data.measure", case, engine, kind, str(work)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | ONE_THREAD | {"HF_DATASETS_OFFLINE": "1"}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": versions,
    }


if __name__ == "__main__":
    main()
