"""The gate under other versions of torch and transformers, as one page: an upgrade is a row to read before it is made.

    python -m parity_tests.matrix --transformers 5.18.0 5.24.0 --out versions.md

Each version is installed into a folder of its own in `--cache`, in front of what is installed here: transformers
without its dependencies, torch with them (name an index of builds for your device: `--pip "--index-url URL"`).
"""

import argparse
import importlib.metadata
import os
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import save
from parity_tests.report.schema import CaseReport, Report, read_report

ROOT = Path(__file__).parents[1]
HEAD = """# Versions

Made by `python -m parity_tests.matrix` from `{config}` on {hardware}. A cell is the largest
error over allowance of its cases; a column names their number in brackets. Up to 1 passes.

"""
HERE = {name: importlib.metadata.version(name).partition("+")[0] for name in ("torch", "transformers")}


def main() -> int:
    """Run every pair of versions, write the page or print it; 1 if a case of one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for package, version in HERE.items():
        parser.add_argument(f"--{package}", nargs="*", default=[version], help=f"versions; default: {version}")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/parity/matrix.yaml", help="the gate")
    parser.add_argument("--cache", type=Path, default=Path("cache/matrix"), help="where versions are installed")
    parser.add_argument("--pip", default="", help="options of pip, in one string")
    parser.add_argument("--out", type=Path, help="the page to write; default: print it")
    arguments = parser.parse_args()
    rows: dict[tuple[str, ...], Report | str] = {}
    for pair in product(arguments.torch, arguments.transformers):
        try:
            rows[pair] = run_pair(*pair, arguments.config, arguments.cache, shlex.split(arguments.pip))
        except UserError as error:
            rows[pair] = str(error)
    text = page(rows, arguments.config.name)
    if arguments.out:
        save(arguments.out, text.encode())
    else:
        print(text, end="")
    return int(any(isinstance(report, str) or not report.passed for report in rows.values()))


def run_pair(torch: str, transformers: str, config: Path, cache: Path, pip: list[str]) -> Report:
    """Install a pair and run the gate on it. Raises UserError: it cannot be installed, or another version ran."""
    versions, folders = {"torch": torch, "transformers": transformers}, []
    for package, version in versions.items():
        folder = (cache / f"{package}-{version}").resolve()
        if version != HERE[package]:
            folders.append(str(folder))
            if not (folder / package).is_dir():
                options = [*["--no-deps"] * (package == "transformers"), *pip, f"{package}=={version}"]
                _run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *options])
    out = (cache / f"torch-{torch}-transformers-{transformers}").resolve()
    (out / "report.json").unlink(missing_ok=True)
    path = os.pathsep.join([*folders, str(ROOT)])
    _run([sys.executable, "-m", "parity_tests", "run", str(config), "--out", str(out)], path, out / "report.json")
    report = read_report(out / "report.json")
    for package, version in versions.items():
        if (ran := report.environment.versions[package].partition("+")[0]) != version:
            raise UserError(f"{package} {version} was asked for, and {ran} ran")
    return report


def _run(command: list[str], path: str = "", leaves: Path | None = None) -> None:
    """Raise UserError with the last line of a command that fails; a gate may, if it leaves its report."""
    environment = os.environ | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode and not (leaves and leaves.is_file()):
        raise UserError((done.stderr.strip().splitlines() or [f"{command[2]} fails without a word"])[-1])


def page(rows: dict[tuple[str, ...], Report | str], config: str) -> str:
    """A table of versions by engine and dtype, and below it what fails."""
    reports = [report for report in rows.values() if isinstance(report, Report)]
    columns = list(dict.fromkeys(_column(case) for report in reports for case in report.cases))
    columns = [column for column in columns if any(_judged(report.cases, column) for report in reports)]
    counts = [max(len(_judged(report.cases, column)) for report in reports) for column in columns]
    heads = [f"{column} ({count})" for column, count in zip(columns, counts, strict=True)]
    lines = ["| torch | transformers | " + " | ".join(heads) + " |", "| --- " * (2 + len(columns)) + "|"]
    faults: list[str] = []
    alike: dict[tuple[str, ...], list[str]] = {}  # versions of transformers, by that of torch and the cells
    for pair, report in rows.items():
        cases = report.cases if isinstance(report, Report) else []
        cells = [_cell(_judged(cases, column)) for column in columns]
        alike.setdefault((pair[0], *cells), []).append(pair[1])
        words = [f"`{case.id}`: {case.reasons[0]}" for case in cases if case.failed] if cases else [str(report)]
        faults += [f"- torch {pair[0]}, transformers {pair[1]}: {why}" for why in words]
    lines += ["| " + " | ".join([torch, ", ".join(own), *cells]) + " |" for (torch, *cells), own in alike.items()]
    hardware = reports[0].environment.hardware if reports else "no machine"
    return HEAD.format(config=config, hardware=hardware) + "\n".join([*lines, "", *faults]).rstrip() + "\n"


def _judged(cases: list[CaseReport], column: str) -> list[CaseReport]:
    return [case for case in cases if case.skipped is None and _column(case) == column]


def _column(case: CaseReport) -> str:
    return f"{case.settings['engine']} {case.settings['dtype']}"


def _cell(cases: list[CaseReport]) -> str:
    if not cases:
        return "not run"
    worst = max((measure.ratio for case in cases for measure in case.measures), default=float("inf"))
    return f"{worst:.2f}" if all(case.passed for case in cases) else f"**{worst:.3g}**"


if __name__ == "__main__":
    sys.exit(main())
