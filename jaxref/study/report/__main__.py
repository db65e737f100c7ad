"""Render a finished study again from its results.json: `python -m jaxref.study.report runs/study`.

With `--document docs/precision.md` the tables and figures of that document are made from it as well.
"""

import sys
from pathlib import Path

from jaxref.study.report import write_report
from jaxref.study.report.docs import refresh
from jaxref.study.schema import read_results

USAGE = "usage: python -m jaxref.study.report FOLDER [--document FILE]: give the one folder that holds results.json"


def main(arguments: list[str]) -> int:
    """Render the study in the folder given. Returns the exit code: 2 for a user's mistake."""
    if len(arguments) not in (1, 3) or arguments[1:2] not in ([], ["--document"]):
        print(USAGE, file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        results = read_results(folder / "results.json")
        if len(arguments) == 3:
            refresh(results, Path(arguments[2]))
        print(write_report(results, folder))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
