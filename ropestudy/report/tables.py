"""The figures' tables, as CSV with every digit."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from anchorline.files import replace_file
from ropestudy.report.figure import Figure


def write_tables(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Write `<name>.csv` of every table, UTF-8; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for table in (table for figure in figures for table in figure.tables):
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([table.heads, *table.rows])
        made.append(folder / f"{table.name}.csv")
        replace_file(made[-1], text.getvalue().encode())
    return made
