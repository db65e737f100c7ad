"""A study's records as plain tables, one CSV file for each kind of record.

A number over texts becomes three columns: its mean (of KL the geometric one) and the ends of its interval.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anchorline.files import replace_file
from ropestudy.report.effects import mean_of, typical_of
from ropestudy.schema import Results

SKIPPED = ("kind", "about", "columns")


def write_tables(results: Results, folder: Path) -> None:
    """Write `attention.csv` and `outputs.csv` with every digit, UTF-8."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in dict.fromkeys(one.kind for one in results.records):
        rows = [dict(_cells("", one.model_dump())) for one in results.records if one.kind == kind]
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(folder / f"{kind}.csv", text.getvalue().encode())


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, cell) of everything inside a value."""
    if isinstance(value, dict) and value.keys() == {"mean", "values"}:
        effect = (typical_of if name.endswith("kl") else mean_of)(value["values"])
        yield from ((name, effect.value), (f"{name}, from", effect.low), (f"{name}, to", effect.high))
    elif isinstance(value, dict):
        for key, held in value.items():
            if key not in SKIPPED:
                yield from _cells(f"{name} {key}".strip(), held)
    else:
        yield name, value
