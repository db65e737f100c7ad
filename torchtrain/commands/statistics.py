"""The verbs `prepare` and `stats`: make a token store; count what it holds, as a table and JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from anchorline.errors import UserError, disk_fault, print, quoted
from anchorline.files import read_json, replace_file, resolve_folder
from anchorline.terminal import Console
from torchtrain import data
from torchtrain.config import Preparation
from torchtrain.data import TokenStore
from torchtrain.data.prepare import Submitted
from torchtrain.data.statistics import ROW_LENGTHS, RowStatistics, StoreStatistics, count_store
from torchtrain.data.store import HEADER
from torchtrain.modeling.source import open_tokenizer, resolve_source
from torchtrain.run.report import make_progress_printer

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


def prepare_corpus(preparation: Preparation, out: Path, dry_run: bool = False) -> None:
    """Make the store of a preparation in a folder, and print its statistics.

    dry_run: print Slurm's script and write nothing.
    Raises UserError: as `torchtrain.data.prepare_store`.
    Raises TasksUnfinished: a worker was killed.
    """
    console = Console(stderr=True)

    def log(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    out = resolve_folder("--out", out)
    settings = preparation.tokenizer
    source = resolve_source(
        settings.source, preparation.data.cache, log, needs="tokenizer", trust_remote_code=settings.trust_remote_code
    )
    tokenizer = open_tokenizer(source, settings.trust_remote_code)
    rows = read_json(Path(source, "config.json"), "tokenizer.source").get("vocab_size")
    if added := data.check_tokenizer(tokenizer, rows if isinstance(rows, int) else len(tokenizer), source):
        log(f"warning   {added}")
    for number, one in enumerate(preparation.data.sources):
        if one.dataset is not None and one.revision is None and not Path(one.dataset).is_dir():
            log(
                f"unpinned  data.sources.{number}: dataset {quoted(one.dataset)} has no revision, so it may change; "
                "give a commit"
            )
    with console.status("looking at the sources") as spinner:
        made = data.prepare_store(
            preparation, tokenizer, out, log, make_progress_printer(console, spinner, log), dry_run
        )
    if isinstance(made, Submitted):
        if made.script is not None:
            print(made.script, end="")
        else:
            log(f"submitted {made.tasks:,} tasks; when they are done, run the same command again: it joins them")
        return
    print_statistics(made.folder, made.folder)
    print(f"store in {made.folder}")
