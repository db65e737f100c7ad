"""A study's records as plain tables: one list of rows for each kind of record, every row a dict with the same keys.

A number over texts becomes three columns: its mean (of KL the geometric one) and the ends of its interval.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from anchorline.files import replace_file
from ropestudy.report.effects import format_number, mean_of, typical_of
from ropestudy.schema import AnyRecord, Results, Stat

TableRow = dict[str, Any]
KINDS = {
    "outcome": "Outputs: distance from float64, loss and copies",
    "score": "Attention: moved by a shift, and distance from float64 (probability per query, 0 to 2)",
    "shift_pairs": "D of pairs of shifts (eq. 5)",
    "per_token": "The first column's part",
    "by_length": "By length",
    "by_frequency": "Rotary pairs, group by group",
    "mask_pair": "One mask against another",
    "signed_bias": "Signed errors of the first column's logits",
    "emulation_check": "The emulation beside torch",
}
SKIPPED = ("kind", "about")


def make_tables(results: Results) -> dict[str, list[TableRow]]:
    """Return the rows of each kind of record that the study has, by the kind's name."""
    found: dict[str, list[TableRow]] = {}
    for record in results.records:
        found.setdefault(record.kind, []).extend(_rows(record))
    for rows in found.values():
        names = list(dict.fromkeys(name for row in rows for name in row))
        rows[:] = [{name: row.get(name) for name in names} for row in rows]
    return {kind: found[kind] for kind in KINDS if kind in found}


def write_tables(tables: dict[str, list[TableRow]], folder: Path) -> None:
    """Write `<kind>.csv` of each table with every digit, UTF-8."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind, rows in tables.items():
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        replace_file(folder / f"{kind}.csv", text.getvalue().encode())


def format_cell(value: Any) -> str:
    """Return a cell for a reader: three significant digits."""
    return format_number(value) if isinstance(value, float) else "" if value is None else str(value)


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
