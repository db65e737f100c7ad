"""The verbs `prepare` and `stats`: make a token store; count what it holds, as tables, JSON and one page."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import matplotlib
from markupsafe import Markup
from matplotlib.figure import Figure as Canvas
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import replace_file, resolve_folder
from anchorline.page import figure_style, inline, render
from anchorline.page.figures import SERIES
from torchtrain.config import ModelConfig, Preparation
from torchtrain.data import TokenStore
from torchtrain.data.produce import Submitted, produce
from torchtrain.data.statistics import ROW_LENGTHS, Histogram, RowStatistics, StoreStatistics, statistics_of
from torchtrain.data.store import HEADER
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
    """What a step of rows of one length costs a model, against full attention."""

    sequence_length: int
    attention_share: float  # of the FLOPs of a step with full attention
    speedup: float  # of the whole step, by FLOPs


@dataclass(frozen=True)
class Grid:
    """A table of text, for a terminal and a page alike."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def show(tables: Sequence[Table]) -> None:
    """Print tables; where it is no terminal, as wide as they are."""
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
    told = statistics_of(store, row_lengths or ROW_LENGTHS)
    steps = count_steps(told.rows, model, "cache")
    grids = grids_of(told, steps, model)
    content = asdict(told) | {"model": model, "steps": [asdict(step) for step in steps]}
    page = _page(told, grids)
    try:
        out.mkdir(parents=True, exist_ok=True)
        replace_file(out / JSON, json.dumps(content, indent=1).encode() + b"\n")
        replace_file(out / PAGE, page.encode())
    except OSError as error:
        raise UserError(f"--out {quoted(out)} cannot be written: {disk_fault(error)}; choose another folder") from None
    return [_table(grid) for grid in grids]


def grids_of(told: StoreStatistics, steps: Sequence[StepCost], model: str) -> list[Grid]:
    """Return all tables."""
    columns = ("domain", "documents", "ratio", "tokens", "token ratio", "in long ones", "mean", "median", "longest")
    copies = f" {told.copies:,} documents are copies of others." if told.copies else ""
    if told.near_copies:
        copies += f" {told.near_copies:,} more are nearly so."
    grids = [
        Grid(
            "Domains",
            columns,
            [
                (
                    one.domain,
                    f"{one.documents:,}",
                    f"{one.document_share:.2%}",
                    f"{one.tokens:,}",
                    f"{one.token_share:.2%}",
                    f"{one.long_token_share:.1%}",
                    f"{one.mean:,.0f}",
                    f"{one.median:,.0f}",
                    f"{one.longest:,}",
                )
                for one in (*told.domains, told.all)
            ],
            f"Lengths are in tokens; long: {told.long_tokens:,} or more.{copies}",
        )
    ]
    if told.before is not None:
        grids.append(_changes(told))
    if told.mixture is not None:
        grids.append(_classes(told))
    names = [one.domain for one in told.domains]
    grids.append(
        Grid(
            "Mixture ratio",
            ("tokens a row", "rows", *names),
            [
                (f"{row.sequence_length:,}", f"{row.rows:,}", *(f"{row.mixture_ratio[name]:.2%}" for name in names))
                for row in told.rows
            ],
            "Of sequences: documents, or pieces of them, that rows hold; packed one after another.",
        )
    )
    grids.append(
        Grid(
            "Attention",
            ("tokens a row", "live-pair ratio r", "attention", "attention's share of a step", "step"),
            [
                (
                    f"{row.sequence_length:,}",
                    f"{row.live_pair_ratio:.4f}",
                    f"{row.attention_speedup:.1f}x",
                    f"{step.attention_share:.0%}",
                    f"{step.speedup:.2f}x",
                )
                for row, step in zip(told.rows, steps, strict=True)
            ],
            "r = sum of squared sequence lengths / T²: what attention within documents leaves of full attention. "
            f"Speed-ups are of FLOPs, of the step those of {model}.",
        )
    )
    grids.append(
        Grid(
            "Balance of ranks",
            ("tokens a row", "ranks", "steps", "sequential", "by length"),
            [
                (
                    f"{one.sequence_length:,}",
                    f"{one.ranks:,}",
                    f"{one.steps:,}",
                    f"{one.sequential:.2f}",
                    f"{one.by_length:.2f}",
                )
                for one in told.balance
            ],
            "Attention of a step's fullest row over the mean of its rows, one a data-parallel rank: what all others "
            "wait for; as rows come, and under pack.strategy by_length.",
        )
    )
    return grids


def _changes(told: StoreStatistics) -> Grid:
    assert told.before is not None
    columns = ("domain", "documents", "tokens", "token share", "in long documents", "mean length")
    return Grid(
        "What the mixture and the removal of duplicates changed",
        columns,
        [
            (
                now.domain,
                f"{was.documents:,} → {now.documents:,}",
                f"{was.tokens:,} → {now.tokens:,}",
                f"{was.token_share:.2%} → {now.token_share:.2%}",
                f"{was.long_token_share:.1%} → {now.long_token_share:.1%}",
                f"{was.mean:,.0f} → {now.mean:,.0f}",
            )
            for was, now in zip(told.before, told.domains, strict=True)
        ],
        f"Long: {told.long_tokens:,} tokens or more.",
    )


def _classes(told: StoreStatistics) -> Grid:
    short = sum(max(0, one.wanted - one.taken) for one in told.mixture or ())
    return Grid(
        "How often documents are taken",
        ("domain", "documents", "held", "taken at all", "most often", "tokens wanted", "tokens taken"),
        [
            (
                one.domain,
                "long" if one.long else "short",
                f"{one.documents:,}",
                f"{one.distinct:,}",
                f"{one.most_repeats}",
                f"{one.wanted:,}",
                f"{one.taken:,}",
            )
            for one in told.mixture or ()
        ],
        f"{short:,} tokens are missing, because no document is taken more often (data.mixture.most_repeats)."
        if short
        else "",
    )


def _table(grid: Grid) -> Table:
    table = Table(title=grid.title, caption=grid.note or None)
    for number, name in enumerate(grid.columns):
        table.add_column(escape(name), justify="right" if number else "left")
    for row in grid.rows:
        table.add_row(*map(escape, row))
    return table


def _page(told: StoreStatistics, grids: Sequence[Grid]) -> str:
    lede = f"{told.documents:,} documents, {told.tokens:,} tokens, {len(told.domains)} domains."
    histogram = told.histogram
    figures = [
        (_draw(histogram, histogram.documents, "documents"), "documents"),
        (_draw(histogram, histogram.tokens, "tokens"), "tokens"),
    ]
    return render(
        "torchtrain.run",
        "statistics.html.j2",
        title="Corpus",
        # No date and no path: a store is the same bytes whenever and wherever it is made.
        created="",
        command="torchtrain stats FOLDER",
        facts={"fingerprint": told.fingerprint},
        versions=versions(("anchorline", "numpy")),
        lede=lede,
        grids=grids,
        figures=figures,
    )


def _draw(histogram: Histogram, counts: dict[str, list[int]], what: str) -> Markup:
    """Draw what lengths hold, over a logarithmic axis: the largest domains, and the others together."""
    order = sorted(counts, key=lambda name: -sum(histogram.tokens[name]))  # a domain has one colour in all figures
    lines = {name: counts[name] for name in order[:_MOST_LINES]}
    if len(order) > _MOST_LINES:
        last = order[_MOST_LINES - 1 :]
        del lines[last[0]]
        lines[f"{len(last)} others"] = [sum(column) for column in zip(*(counts[name] for name in last), strict=True)]
    drawn = io.StringIO()
    with matplotlib.rc_context(figure_style(f"statistics-{what}")):
        canvas = Canvas(figsize=(6.4, 3.4), layout="constrained")
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
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return inline(drawn.getvalue(), f"{what} by length of document")


def prepare_store(preparation: Preparation, out: Path, dry_run: bool = False) -> None:
    """Make the store of a preparation in a folder, and tell what came of it.

    Args:
        preparation: what of, and by whom.
        out: the store's folder.
        dry_run: print Slurm's script and write nothing.

    Raises:
        UserError: as `torchtrain.data.produce.produce`.
        TasksUnfinished: a worker was killed.
    """
    console, told = Console(stderr=True), Console()

    def log(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    out = resolve_folder("--out", out)
    settings = preparation.tokenizer
    source = resolve_source(
        settings.source, preparation.data.cache, log, needs="tokenizer", trust_remote_code=settings.trust_remote_code
    )
    tokenizer = open_tokenizer(source, settings.trust_remote_code)
    for number, one in enumerate(preparation.data.sources):
        if one.dataset is not None and one.revision is None and not Path(one.dataset).is_dir():
            log(
                f"unpinned  data.sources.{number}: dataset {quoted(one.dataset)} has no revision, so it may be another "
                "tomorrow; give a commit"
            )
    with console.status("looking at the sources") as spinner:
        report_progress = make_progress_printer(console, spinner, log)
        made = produce(preparation, tokenizer, out, log, report_progress, dry_run)
    if isinstance(made, Submitted):
        if made.script is not None:
            print(made.script, end="")
        else:
            log(f"submitted {made.tasks:,} tasks; when they are done, run the same command again: it joins them")
        return
    show(write_statistics(made.folder, made.folder))
    told.print(f"store in {made.folder}", markup=False, soft_wrap=True)
