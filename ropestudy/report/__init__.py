"""Show a study's results: `python -m ropestudy.report runs/study` makes tables and figures of its `results.json`."""

from pathlib import Path

from ropestudy.report.figures import write_figures
from ropestudy.report.tables import write_tables
from ropestudy.schema import Results

__all__ = ["write_report"]


def write_report(results: Results, folder: Path) -> None:
    """Write `tables/*.csv` and `figures/*.png` into an existing folder."""
    write_tables(results, folder / "tables")
    write_figures(results, folder / "figures")
