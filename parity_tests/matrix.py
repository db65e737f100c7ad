"""The gate under other versions of torch and transformers, as one page: an upgrade is a row to read before it is made.

    python -m parity_tests.matrix --transformers 5.18.0 5.22.2 --out docs/matrix.md
    python -m parity_tests.matrix --torch 2.12.0 2.13.0 --pip "--index-url URL" --out docs/matrix.md

Each pair of versions is installed into a folder of its own below `--cache`, in front of what is installed here, and
runs the gate in a process of its own. transformers comes without its dependencies, torch with them: name an index that
has builds for your device. A version that is installed here is taken as it is. A cell is the worst error over
allowance of its cases; it passes up to 1.
"""

import argparse
import importlib.metadata
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import save
from parity_tests.report.schema import CaseReport, Report, read_report

ROOT = Path(__file__).parents[1]
HEAD = """# Versions

`python -m parity_tests.matrix` made this page with `{config}` on {hardware}. A cell is the worst error over allowance
of its cases (up to 1 passes) and their number.

"""


def main() -> int:
    """Run every pair, print and write the page; 1 if a case of one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for package in ("torch", "transformers"):
        here = importlib.metadata.version(package)
        parser.add_argument(f"--{package}", nargs="*", default=[here], help="versions; default: the one that is here")
    parser.add_argument("--config", type=Path, default=ROOT / "configs/parity/matrix.yaml", help="the gate")
    parser.add_argument("--cache", type=Path, default=Path("cache/matrix"), help="where versions are installed")
    parser.add_argument("--pip", default="", help="options for pip, in one string")
    parser.add_argument("--out", type=Path, help="the page to write")
    arguments = parser.parse_args()
    rows: dict[tuple[str, str], Report | str] = {}
    for pair in product(arguments.torch, arguments.transformers):
        try:
            rows[pair] = run_pair(*pair, arguments.config, arguments.cache, shlex.split(arguments.pip))
        except UserError as error:
            rows[pair] = str(error)
        print(f"torch {pair[0]}, transformers {pair[1]}: {_verdict(rows[pair])}", flush=True)
    if arguments.out:
        save(arguments.out, page(rows, arguments.config.name).encode())
    return int(any(isinstance(report, str) or not report.passed for report in rows.values()))


def run_pair(torch: str, transformers: str, config: Path, cache: Path, pip: Sequence[str]) -> Report:
    """Install a pair and run the gate on it. Raises UserError: it cannot be installed, or leaves no report."""
    folders = [
        folder
        for package, version, how in (("torch", torch, []), ("transformers", transformers, ["--no-deps"]))
        if (folder := _install(package, version, cache, [*how, *pip])) is not None
    ]
    out = (cache / f"torch-{torch}-transformers-{transformers}").resolve()
    (out / "report.json").unlink(missing_ok=True)
    path = os.pathsep.join([*map(str, folders), str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, "-m", "parity_tests", "run", str(config), "--out", str(out)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, cwd=ROOT)
    if not (out / "report.json").is_file():
        raise UserError(f"the gate does not run: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    report = read_report(out / "report.json")
    for package, version in (("torch", torch), ("transformers", transformers)):
        ran = report.environment.versions[package]
        if ran.partition("+")[0] != version.partition("+")[0]:
            raise UserError(f"{package} {version} was asked for, and {ran} ran")
    return report


def _install(package: str, version: str, cache: Path, options: Sequence[str]) -> Path | None:
    if version.partition("+")[0] == importlib.metadata.version(package).partition("+")[0]:
        return None
    folder = (cache / f"{package}-{version}").resolve()
    if not (folder / package).is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *options]
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"pip: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    return folder


def page(rows: dict[tuple[str, str], Report | str], config: str) -> str:
    """A table of versions by engine and dtype, and below it what fails."""
    reports = [report for report in rows.values() if isinstance(report, Report)]
    columns = list(dict.fromkeys(_column(case) for report in reports for case in report.cases))
    hardware = reports[0].environment.hardware if reports else "no machine"
    lines = ["| torch | transformers | " + " | ".join(columns) + " |", "| --- " * (2 + len(columns)) + "|"]
    faults = []
    for (torch, transformers), report in rows.items():
        cells = [_cell(report, column) for column in columns]
        lines.append(f"| {torch} | {transformers} | " + " | ".join(cells) + " |")
        faults += [f"- torch {torch}, transformers {transformers}: {fault}" for fault in _faults(report)]
    return HEAD.format(config=config, hardware=hardware) + "\n".join([*lines, "", *faults]).rstrip() + "\n"


def _column(case: CaseReport) -> str:
    return f"{case.engine} {case.dtype}"


def _cell(report: Report | str, column: str) -> str:
    if isinstance(report, str):
        return "not run"
    own = [case for case in report.cases if _column(case) == column and case.skipped is None]
    if not own:
        return "skipped"
    if any(case.problem for case in own):
        return "**fails**"
    worst = max(measure.ratio for case in own for measure in case.measures)
    return f"{worst:.2f} ({len(own)})" if all(case.passed for case in own) else f"**{worst:.3g}**"


def _faults(report: Report | str) -> Iterator[str]:
    if isinstance(report, str):
        yield report
        return
    for case in report.cases:
        words = case.problem or (case.first_divergence and case.first_divergence.words)
        if words:
            yield f"`{case.id}`: {words}"


def _verdict(report: Report | str) -> str:
    faults = list(_faults(report))
    return f"{len(faults)} faults, first: {faults[0]}" if faults else "all the same"


if __name__ == "__main__":
    sys.exit(main())
