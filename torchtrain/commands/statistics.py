"""The verbs `prepare` and `stats`: make a token store; count what it holds, as tables, JSON and one page."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.figure import Figure as Canvas
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import read_json, replace_file, resolve_folder
from anchorline.page import inline, render
from anchorline.page.figures import SERIES, draw_svg
from torchtrain import data
from torchtrain.config import ModelConfig, Preparation
from torchtrain.data import TokenStore
from torchtrain.data.statistics import ROW_LENGTHS, Histogram, RowStatistics, StoreStatistics, count_store
from torchtrain.data.store import HEADER
from torchtrain.data.tasks import Submitted
from torchtrain.modeling.source import open_config, open_tokenizer, resolve_source
from torchtrain.planning.flops import FlopCounter
from torchtrain.planning.memory import Shapes
from torchtrain.run.report import make_progress_printer

JSON, PAGE = "statistics.json", "statistics.html"
MODEL = "meta-llama/Llama-2-7b-hf"  # the paper's first; its shapes come with this package
_MOST_LINES = len(SERIES)
_WIDE = 200  # characters


@dataclass(frozen=True)
class StepCost:
    """The cost of a step of rows of one length, against full attention."""

    sequence_length: int
    attention_share: float  # of the FLOPs of a step with full attention
    speedup: float  # of the whole step, by FLOPs


@dataclass(frozen=True)
class Grid:
    """A table of text, for a terminal and a page alike."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str

    @classmethod
    def of(cls, title: str, columns: Mapping[str, str], items: Iterable[tuple[Any, ...]], note: str) -> "Grid":
        """Make a table of columns, each with the format of its cells, and a row for each tuple of items."""
        rows = [[cell.format(*item) for cell in columns.values()] for item in items]
        return cls(title, list(columns), rows, note)


def show(tables: Sequence[Table]) -> None:
    """Print tables; outside a terminal, as wide as they are."""
    out = Console()
    for table in tables:
        (out if out.is_terminal else Console(width=_WIDE)).print(table)


def count_steps(rows: Sequence[RowStatistics], model: str, cache: str) -> list[StepCost]:
    """Return what a step costs a model by its FLOPs (`torchtrain.planning.flops`), every token labelled.

    Raises:
        UserError: the model's config.json cannot be read.
    """
    config = open_config(resolve_source(model, cache, lambda line: None, needs="config"))
    counter = FlopCounter.of(Shapes(config).model(ModelConfig(source=model)))
    steps = []
    for row in rows:
        length = row.sequence_length
        pairs = length * (length + 1) // 2
        dense = counter.flops(length, length, 0)
        full, left = (counter.flops(length, length, int(n)) for n in (pairs, pairs / row.attention_speedup))
        steps.append(StepCost(length, (full - dense) / full, full / left))
    return steps


def write_statistics(folder: Path, out: Path, row_lengths: Sequence[int] = (), model: str = MODEL) -> list[Table]:
    """Count a store, write JSON and page, and return the tables.

    Args:
        folder: the store's.
        out: where to write.
        row_lengths: of rows; none: the usual ones.
        model: hub id or folder, for what a step costs.

    Raises:
        UserError: there is no store, or the folder cannot be written.
    """
    if not (folder / HEADER).is_file():
        raise UserError(f"{quoted(folder)}: is no finished token store; give a folder with {HEADER}")
    store = TokenStore.open(folder)
    statistics = count_store(store, row_lengths or ROW_LENGTHS)
    steps = count_steps(statistics.rows, model, "cache")
    grids = make_grids(statistics, steps, model)
    content = asdict(statistics) | {"model": model, "steps": [asdict(step) for step in steps]}
    page = _page(statistics, grids)
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / JSON, json.dumps(content, indent=1).encode() + b"\n")
        replace_file(out / PAGE, page.encode())
    except OSError as error:
        raise UserError(f"--out {quoted(out)} cannot be written: {disk_fault(error)}; choose another folder") from None
    return [_table(grid) for grid in grids]


def make_grids(statistics: StoreStatistics, steps: Sequence[StepCost], model: str) -> list[Grid]:
    """Return all tables."""
    copies = f" {statistics.copies:,} documents are copies of others." if statistics.copies else ""
    if statistics.near_copies:
        copies += f" {statistics.near_copies:,} more are nearly so."
    columns = {
        "domain": "{0.domain}",
        "documents": "{0.documents:,}",
        "ratio": "{0.document_share:.2%}",
        "tokens": "{0.tokens:,}",
        "token ratio": "{0.token_share:.2%}",
        "in long ones": "{0.long_token_share:.1%}",
        "mean": "{0.mean:,.0f}",
        "median": "{0.median:,.0f}",
        "longest": "{0.longest:,}",
    }
    note = f"Lengths are in tokens; long: {statistics.long_tokens:,} or more.{copies}"
    grids = [Grid.of("Domains", columns, zip((*statistics.domains, statistics.all)), note)]
    if statistics.before is not None:
        columns = {
            "domain": "{1.domain}",
            "documents": "{0.documents:,} → {1.documents:,}",
            "tokens": "{0.tokens:,} → {1.tokens:,}",
            "token share": "{0.token_share:.2%} → {1.token_share:.2%}",
            "in long documents": "{0.long_token_share:.1%} → {1.long_token_share:.1%}",
            "mean length": "{0.mean:,.0f} → {1.mean:,.0f}",
        }
        title = "What the mixture and the removal of duplicates changed"
        note = f"Long: {statistics.long_tokens:,} tokens or more."
        grids.append(Grid.of(title, columns, zip(statistics.before, statistics.domains, strict=True), note))
    if statistics.mixture is not None:
        columns = {
            "domain": "{0.domain}",
            "documents": "{1}",
            "held": "{0.documents:,}",
            "taken at all": "{0.distinct:,}",
            "most often": "{0.most_repeats}",
            "tokens wanted": "{0.wanted:,}",
            "tokens taken": "{0.taken:,}",
        }
        short = sum(max(0, one.wanted - one.taken) for one in statistics.mixture)
        why = "because no document is taken more often (data.mixture.most_repeats)"
        note = f"{short:,} tokens are missing, {why}." if short else ""
        items = [(one, "long" if one.long else "short") for one in statistics.mixture]
        grids.append(Grid.of("How often documents are taken", columns, items, note))
    names = [one.domain for one in statistics.domains]
    rows = [
        [f"{row.sequence_length:,}", f"{row.rows:,}", *(f"{row.mixture_ratio[name]:.2%}" for name in names)]
        for row in statistics.rows
    ]
    note = "The share of each domain in the documents, or pieces of them, that rows hold; packed one after another."
    grids.append(Grid("Mixture ratio", ["tokens a row", "rows", *names], rows, note))
    columns = {
        "tokens a row": "{0.sequence_length:,}",
        "live-pair ratio r": "{0.live_pair_ratio:.4f}",
        "attention": "{0.attention_speedup:.1f}x",
        "attention's share of a step": "{1.attention_share:.0%}",
        "step": "{1.speedup:.2f}x",
    }
    note = (
        "r = sum of squared sequence lengths / T²: the share of full attention that attention within documents needs. "
        f"Speed-ups are of FLOPs; of a step, those of {model}."
    )
    grids.append(Grid.of("Attention", columns, zip(statistics.rows, steps, strict=True), note))
    columns = {
        "tokens a row": "{0.sequence_length:,}",
        "ranks": "{0.ranks:,}",
        "steps": "{0.steps:,}",
        "sequential": "{0.sequential:.2f}",
        "by length": "{0.by_length:.2f}",
    }
    note = (
        "Attention of a step's fullest row over the mean of its rows, with one row for each data-parallel rank; all "
        "ranks wait for that row. In the order of the data, and under pack.strategy by_length."
    )
    return [*grids, Grid.of("Balance of ranks", columns, zip(statistics.balance), note)]


def _table(grid: Grid) -> Table:
    table = Table(title=grid.title, caption=grid.note or None)
    for number, name in enumerate(grid.columns):
        table.add_column(escape(name), justify="right" if number else "left")
    for row in grid.rows:
        table.add_row(*map(escape, row))
    return table


def _page(statistics: StoreStatistics, grids: Sequence[Grid]) -> str:
    histogram = statistics.histogram
    kinds = {"documents": histogram.documents, "tokens": histogram.tokens}
    return render(
        "torchtrain.commands",
        "statistics.html.j2",
        title="Corpus",
        created="",  # no date and no path: the page of a store has the same bytes whenever and wherever it is made
        command="torchtrain stats FOLDER",
        facts={"fingerprint": statistics.fingerprint},
        versions=versions(("anchorline", "numpy")),
        lede=f"{statistics.documents:,} documents, {statistics.tokens:,} tokens, {len(statistics.domains)} domains.",
        grids=grids,
        figures=[(_draw(histogram, counts, what), what) for what, counts in kinds.items()],
    )


def _draw(histogram: Histogram, counts: dict[str, list[int]], what: str) -> Markup:
    """Draw counts by length, on logarithmic axes: the largest domains, and the others together."""
    order = sorted(counts, key=lambda name: -sum(histogram.tokens[name]))  # a domain has its colour in all figures
    lines = {name: counts[name] for name in order[:_MOST_LINES]}
    if len(order) > _MOST_LINES:
        last = order[_MOST_LINES - 1 :]
        del lines[last[0]]
        lines[f"{len(last)} others"] = [sum(column) for column in zip(*(counts[name] for name in last), strict=True)]

    def put(canvas: Canvas) -> None:
        axes = canvas.subplots()
        for colour, (name, values) in zip(SERIES, lines.items(), strict=False):
            axes.stairs(values, histogram.edges, color=colour, label=name, linewidth=1.5)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("tokens of a document")
        axes.set_ylabel(what)
        axes.minorticks_off()
        axes.legend()

    return inline(draw_svg(f"statistics-{what}", put), f"{what} by length of document")


def prepare_store(preparation: Preparation, out: Path, dry_run: bool = False) -> None:
    """Make the store of a preparation in a folder, and print its statistics.

    Args:
        preparation: the sources, the tokenizer, and how the work is spread.
        out: the store's folder.
        dry_run: print Slurm's script and write nothing.

    Raises:
        UserError: as `torchtrain.data.prepare_store`.
        TasksUnfinished: a worker was killed.
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
    show(write_statistics(made.folder, made.folder))
    print(f"store in {made.folder}")
