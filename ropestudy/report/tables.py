"""A study's records as plain tables, one for each kind of record.

A number over texts becomes three columns: its mean (of KL the geometric one) and the ends of its interval.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from anchorline.files import replace_file
from ropestudy.report.effects import mean_of, typical_of
from ropestudy.schema import AnyRecord, Results, Stat

TableRow = dict[str, Any]
SKIPPED = ("kind", "about")


def write_tables(results: Results, folder: Path) -> None:
    """Write `<kind>.csv` of each kind of record with every digit, UTF-8."""
    tables: dict[str, list[TableRow]] = {}
    for record in results.records:
        tables.setdefault(record.kind, []).extend(_rows(record))
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rows in tables.items():
        text = io.StringIO()
        writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(folder / f"{kind}.csv", text.getvalue().encode())


def _rows(record: AnyRecord) -> Iterator[TableRow]:
    """Yield a row for the record, or one for each of its pairs, points or groups."""
    row = dict(_cells("", record))
    parts = [part for name in type(record).model_fields for part in _models(getattr(record, name))]
    yield from ([row | dict(_cells("", part)) for part in parts] or [row])


def _models(value: Any) -> list[BaseModel]:
    return [one for one in value if isinstance(one, BaseModel)] if isinstance(value, list) else []


def _cells(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (column, cell) of everything inside a value that is no list."""
    if isinstance(value, Stat):
        effect = (typical_of if name.endswith("kl") else mean_of)(value.values)
        yield from ((name, effect.value), (f"{name}, from", effect.low), (f"{name}, to", effect.high))
    elif isinstance(value, BaseModel | dict):
        inside = (
            {key: getattr(value, key) for key in type(value).model_fields} if isinstance(value, BaseModel) else value
        )
        for key, held in inside.items():
            if key not in SKIPPED:
                yield from _cells(f"{name} {key}".strip(), held)
    elif not isinstance(value, list | tuple):
        yield name, value
