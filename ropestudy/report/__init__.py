"""What becomes of `results.json`: `report.html`, figures and tables.

`claims_*` judge, `figures_*` draw, `html` puts the page together. Nothing here computes attention: a study
is rendered anew from its file alone, `python -m ropestudy.report runs/study`.
"""

from pathlib import Path

from anchorline.files import replace_file
from ropestudy.report.figure import write_png
from ropestudy.report.html import figures_of, render
from ropestudy.report.tables import write_tables
from ropestudy.schema import Results

PAGE, FIGURES, TABLES = "report.html", "figures", "tables"

__all__ = ["render", "write_figures", "write_report"]


def write_report(results: Results, folder: Path) -> Path:
    """Write `report.html`, `figures/*.png` and `tables/*.csv` into an existing folder; return the page's path.

    Figures and tables that this study does not have are not written.
    """
    write_figures(results, folder / FIGURES)
    write_tables(figures_of(results), folder / TABLES)
    replace_file(folder / PAGE, render(results).encode())
    return folder / PAGE


def write_figures(results: Results, folder: Path) -> list[Path]:
    """Write every figure as a PNG, made with matplotlib's Agg: `shift.png`, `length.png`, ...; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for figure in figures_of(results):
        made.append(folder / f"{figure.name}.png")
        write_png(figure, made[-1])
    return made
