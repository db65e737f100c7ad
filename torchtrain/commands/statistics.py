"""What a token store holds, as a table and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import replace_file
from anchorline.terminal import Console
from torchtrain.data import TokenStore
from torchtrain.data.statistics import ROW_LENGTHS, RowStatistics, StoreStatistics, count_store
from torchtrain.data.store import HEADER

JSON = "statistics.json"
_WIDE = 200  # characters
_CELLS = ("{0.documents:,}", "{0.tokens:,}", "{0.token_share:.2%}", "{0.long_token_share:.1%}", "{0.mean:,.0f}")
_CELLS += ("{0.longest:,}",)


def print_statistics(folder: Path, out: Path, row_lengths: Sequence[int] = ()) -> None:
    """Count a store, write statistics.json into `out`, print the table. Raises UserError: no store, or no writing."""
    if not (folder / HEADER).is_file():
        raise UserError(f"{quoted(folder)}: is no finished token store; give a folder with {HEADER}")
    statistics = count_store(TokenStore.open(folder), row_lengths or ROW_LENGTHS)
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / JSON, json.dumps(asdict(statistics), indent=1).encode() + b"\n")
    except OSError as error:
        raise UserError(f"--out {quoted(out)} cannot be written: {disk_fault(error)}; choose another folder") from None
    console = Console()
    wide = console if console.is_terminal else Console(width=_WIDE)
    wide.print(make_table(statistics))
    wide.print(make_context_table(statistics.rows))


def make_table(statistics: StoreStatistics) -> Table:
    """Return a row for each domain, with its share of the sequences in rows of each length, and the live pairs."""
    notes = [f"Long: {statistics.long_tokens:,} tokens or more. By tokens a row: shares of sequences; r: live pairs."]
    if statistics.before is not None:
        notes.append("Before the arrow: the corpus; after it: what is taken.")
    if statistics.copies:
        notes.append(f"{statistics.copies:,} documents are copies of others.")
    if missing := sum(max(0, one.wanted - one.taken) for one in statistics.mixture or ()):
        notes.append(f"{missing:,} tokens of the mixture are missing (data.mixture.most_repeats).")
    table = Table(title="What the store holds", caption=" ".join(notes))
    table.add_column("domain")
    lengths = [f"{row.sequence_length:,}" for row in statistics.rows]
    for name in ("documents", "tokens", "share", "long", "mean", "longest", *lengths):
        table.add_column(name, justify="right")
    for number, one in enumerate(statistics.domains):
        before = [] if statistics.before is None else [statistics.before[number]]
        cells = [" → ".join(cell.format(of) for of in (*before, one)) for cell in _CELLS]
        table.add_row(escape(one.domain), *cells, *(f"{row.mixture_ratio[one.domain]:.2%}" for row in statistics.rows))
    table.add_section()
    cells = [cell.format(statistics.all) for cell in _CELLS]
    table.add_row("all, and r", *cells, *(f"{row.live_pair_ratio:.4f}" for row in statistics.rows))
    return table


def make_context_table(rows: Sequence[RowStatistics]) -> Table:
    """Return a row for each effective context: its share of the targets, and of their weight, by tokens a row."""
    table = Table(
        title="How many tokens predictions see, where documents are apart",
        caption="Shares of targets → of their weight, by the default of train.loss_weight with a tail from about a "
        "quarter of a row on.",
    )
    table.add_column("tokens seen", justify="right")
    for row in rows:
        table.add_column(f"{row.sequence_length:,}", justify="right")
    known = [{one.start: one for one in row.contexts} for row in rows]
    sums = [(sum(x.targets for x in row.contexts), sum(x.targets * x.weight for x in row.contexts)) for row in rows]
    for start in sorted({start for of_row in known for start in of_row}):
        cells = [
            f"{one.targets / targets:.2%} → {one.targets * one.weight / weight:.2%}"
            if (one := of_row.get(start))
            else ""
            for of_row, (targets, weight) in zip(known, sums, strict=True)
        ]
        table.add_row(f"{start:,} to {2 * start - 1:,}", *cells)
    return table
