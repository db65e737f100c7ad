"""The command: `benchmarks/fuzz.sh` says how to run it; its exit code is 1 if anything was found."""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.fuzz.kinds import KINDS
from benchmarks.fuzz.report import Report
from benchmarks.fuzz.runner import try_one
from benchmarks.fuzz.valid import make_files
from parity_tests.commands import load_apps

SECONDS = 120.0  # for one input; the slowest that is right takes ten on an idle machine
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "120",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}
_IMPORTED = (
    *("transformers", "jaxref.convert", "jaxref.mask_figure", "jaxref.ring", "ropestudy.report", "ropestudy.run"),
    *("parity_tests.check", "parity_tests.gate.run", "parity_tests.gate.weights", "parity_tests.zoo.run"),
    *("torchtrain.run.recipe", "torchtrain.planning.budget", "torchtrain.run.status", "torchtrain.run.verify"),
)


def main() -> int:
    """Run the inputs; return 1 if one of them found a fault."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/fuzz.sh", description="Count tracebacks and hangs on damaged inputs."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--only", type=int, default=None, help="number of a single input, whose folder is kept")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for one input")
    parser.add_argument("--quick", action="store_true", help="only commands that neither train nor compile")
    parser.add_argument("--slow", type=float, default=60.0, help="inputs that take longer are named")
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds: {', '.join(unknown)}; known are {', '.join(KINDS)}")
    os.environ |= ENVIRONMENT
    _import()
    top = Path(tempfile.mkdtemp(prefix="fuzz-"))
    valid = top / "valid"
    valid.mkdir()
    make_files(valid, set(kinds))
    alone = given.only is not None
    report = Report(slow=-1.0 if alone else given.slow)
    again = f"benchmarks/fuzz.sh --seed {given.seed}{' --quick' * given.quick}"
    again += "" if kinds == list(KINDS) else f" --kinds {given.kinds}"
    try:
        for number in [given.only] if alone else range(given.first, given.first + given.count):
            drawn, ended, folder = try_one(given.seed, number, kinds, valid, given.seconds, given.quick)
            report.add(number, drawn, ended, f"{again} --only {number}")
            if alone:
                print(f"  kept in {folder}")
            else:
                shutil.rmtree(folder.parents[2])
    finally:
        if not alone:
            shutil.rmtree(top, ignore_errors=True)
    report.end()
    return int(report.faults > 0)


def _import() -> None:
    """Import once what every child needs. None of it may start threads before a fork."""
    import torch

    torch.set_num_threads(1)
    load_apps()
    for name in _IMPORTED:
        importlib.import_module(name)


if __name__ == "__main__":
    sys.exit(main())
