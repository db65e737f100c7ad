"""A study's records as plain tables: one list of rows for each kind of record, every row a dict with the same keys.

An effect becomes three columns: the value and the ends of its interval over the texts.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from anchorline.files import replace_file
from ropestudy.report.effects import Effect, common_share, difference_of, format_number, mean_of, typical_of
from ropestudy.schema import (
    AnyRecord,
    ByFrequency,
    ByLength,
    EmulationCheck,
    MaskPair,
    Outcome,
    OutputDivergence,
    OwnError,
    PerToken,
    Results,
    Score,
    ShiftPairs,
    SignedBias,
)

TableRow = dict[str, Any]
KINDS = {
    "outcome": "Outputs: distance from float64, loss and copies",
    "score": "Attention: moved by a shift, and distance from float64 (probability per query, 0 to 2)",
    "shift_pairs": "D of pairs of shifts (eq. 5)",
    "per_token": "The first column's part",
    "by_length": "By length",
    "own_error": "Distance from float64 at each shift",
    "by_frequency": "Rotary pairs, group by group",
    "mask_pair": "One mask against another",
    "signed_bias": "Signed errors of the first column's logits",
    "emulation_check": "The emulation beside torch",
}


def make_tables(results: Results) -> dict[str, list[TableRow]]:
    """Return the rows of each kind of record that the study has, by the kind's name."""
    found: dict[str, list[TableRow]] = {}
    for record in results.records:
        found.setdefault(record.kind, []).extend(_rows(record))
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
    start = {"model": record.model, "condition": record.condition, "from": record.attention_from}
    start |= {"tokens": record.tokens, "texts": record.sequences}
    for row in _own_rows(record):
        yield start | row


def _own_rows(record: AnyRecord) -> Iterator[TableRow]:
    if isinstance(record, Outcome):
        where = {"group": record.group, "task": record.task, "start": record.start, "gap": record.gap}
        yield where | {"site": record.site, "bits": record.mantissa_bits} | _outputs("", record.outputs)
    elif isinstance(record, Score):
        where = {"group": record.group, "mask": record.mask, "BOS": record.text, "d1": record.d1, "d2": record.d2}
        for mode in record.shift:
            found = _effect("moved", mean_of(record.shift[mode].row.values))
            found |= _effect("error", mean_of(record.error[mode].row.values))
            found |= _effect("KL of the shift", typical_of(record.kl_shift.kl.values))
            found |= _effect("KL from float64", typical_of(record.kl_error.kl.values))
            yield where | {"gap": record.gap, "mode": mode} | found
    elif isinstance(record, ShiftPairs):
        for pair in record.pairs:
            found = {"mode": record.mode, "d1": pair.d1, "d2": pair.d2}
            yield found | _effect("D", mean_of(pair.difference.d.values)) | {"moved": pair.difference.row.mean}
    elif isinstance(record, PerToken):
        one, columns = record.difference, record.columns
        yield {
            "mode": record.mode, "share of D": one.first_share.mean,
            "share of attention": one.first_mass_unweighted.mean,
            "D of the first column": columns.d[0], "largest other": max(columns.d[1:]),
            "D_logit of the first column": columns.d_logit[0], "smallest other": min(columns.d_logit[1:]),
        }  # fmt: skip
    elif isinstance(record, ByLength):
        for point in record.points:
            found = _effect("D_logit of the first column", mean_of(point.shift.d_logit_first.values))
            found |= {"D_logit of the others": point.shift.d_logit_rest.mean, "moved": point.shift.row.mean}
            found |= {"error": point.error.row.mean if point.error else None}
            yield {"mode": record.mode, "length": point.tokens} | found
    elif isinstance(record, OwnError):
        for one in record.points:
            yield {"mode": record.mode, "shift": one.shift} | _effect("error", mean_of(one.error.row.values))
    elif isinstance(record, ByFrequency):
        for group in record.groups:
            found = {"mode": record.mode, "first pair": group.first, "last pair": group.last}
            found |= {"shortest wavelength": group.wavelengths[0], "longest wavelength": group.wavelengths[1]}
            yield found | _effect("moved", mean_of(group.shift.row.values))
    elif isinstance(record, MaskPair):
        found = {"mode": record.mode, "a": record.a, "b": record.b}
        yield found | _effect("moved", mean_of(record.difference.row.values)) | _outputs("", record.kl)
    elif isinstance(record, SignedBias):
        found = {"mask": record.mask, "start": record.start, "gap": record.gap, "common": common_share(record.first)}
        found |= {"common in other columns": common_share(record.others), "attention": record.first_mass.mean}
        yield found | (_outputs("alone: ", record.alone) if record.alone else {})
    else:
        assert isinstance(record, EmulationCheck)
        for layer, error, ratio in zip(record.layers, record.error, record.ratio, strict=True):
            yield {"dtype": record.dtype, "layer": layer, "error": error, "error over allowance": ratio}


def _effect(name: str, effect: Effect) -> TableRow:
    return {name: effect.value, f"{name}, from": effect.low, f"{name}, to": effect.high}


def _outputs(name: str, outputs: OutputDivergence) -> TableRow:
    found = _effect(f"{name}KL", typical_of(outputs.kl.values))
    loss = difference_of(outputs.nll_q.values, outputs.nll_p.values) if outputs.nll_p and outputs.nll_q else None
    found |= _effect(f"{name}loss added", loss) if loss else {}
    right = {"in float64": outputs.right_p, "here": outputs.right_q}
    return found | {f"{name}right {what}": stat.mean for what, stat in right.items() if stat}
