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

SKIPPED = ("kind", "about")


def write_tables(results: Results, folder: Path) -> None:
    """Write `<kind>.csv` of each kind of record with every digit, UTF-8."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for record in results.records:
        tables.setdefault(record.kind, []).extend(_rows(record.model_dump()))
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rows in tables.items():
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(folder / f"{kind}.csv", text.getvalue().encode())


def _rows(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for the record, or one for each of its pairs or points."""
    parts = [part for value in record.values() if isinstance(value, list) for part in value if isinstance(part, dict)]
    for part in parts or [{}]:
        yield dict(_cells("", record)) | dict(_cells("", part))


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, cell) of everything inside a value that is no list."""
    if isinstance(value, dict) and value.keys() == {"mean", "values"}:
        effect = (typical_of if name.endswith("kl") else mean_of)(value["values"])
        yield from ((name, effect.value), (f"{name}, from", effect.low), (f"{name}, to", effect.high))
    elif isinstance(value, dict):
        for key, held in value.items():
            if key not in SKIPPED:
                yield from _cells(f"{name} {key}".strip(), held)
    elif not isinstance(value, list | tuple):
        yield name, value
