"""Tables as rich prints them, and as Markdown and LaTeX; and figures."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas

from anchorline.errors import UserError, disk_fault
from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page import figure_style
from anchorline.page.figures import SERIES
from torchtrain.evaluation.intervals import MOST_EXPONENT, interval_of, student_interval
from torchtrain.evaluation.measured import Average, Measured, format_length, ruler_averages

TABLES = MarkedPlace("<!-- made by torchtrain compare -->", "<!-- end of torchtrain compare -->")  # of a document
_LATEX = str.maketrans({c: f"\\{c}" for c in "#$%&_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})


@dataclass(frozen=True)
class ScoreCell:
    """A cell's text; bold where a difference was shown."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class ScoreTable:
    """A table: its title, the heads of its columns, rows by name, and what is said below it."""

    title: str
    head: list[str]
    rows: list[tuple[str, list[ScoreCell]]]
    notes: list[str]


def print_tables(tables: Sequence[ScoreTable]) -> None:
    """Print tables for a person."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    for table in tables:
        shown = RichTable(*table.head, title=table.title, box=box.SIMPLE, title_justify="left")
        for name, cells in table.rows:
            shown.add_row(Text(name), *(Text(cell.text, style="bold" if cell.bold else "") for cell in cells))
        console.print(shown)
        for note in table.notes:
            console.print(note, markup=False, soft_wrap=True, highlight=False)


def write_tables(
    tables: Sequence[ScoreTable], facts: Mapping[str, str], folder: Path, figures: Sequence["ScoreFigure"] = ()
) -> None:
    """Write results.md, results.tex, and an SVG for each figure.

    Args:
        tables, figures: what is written.
        facts: a line about each run.
        folder: is made if it is not there.

    Raises:
        UserError: the folder cannot be written.
    """
    texts = {"results.md": _as_markdown(tables, facts), "results.tex": "\n".join(map(latex, tables))}
    texts |= {f"{figure.name}.svg": figure.svg for figure in figures}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            save(folder / name, text.encode())
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def write_document(
    tables: Sequence[ScoreTable], facts: Mapping[str, str], document: Path, figures: Sequence["ScoreFigure"] = ()
) -> None:
    """Put figures and tables between the marks of a Markdown file; the drawings go into `figures/` next to it.

    Raises:
        UserError: as `read_marked`, or it cannot be written.
    """
    text, shown = read_marked(document, [TABLES]), []
    try:
        for figure in figures:
            drawn = document.parent / "figures" / f"{document.stem}-{figure.name}.svg"
            drawn.parent.mkdir(exist_ok=True)
            save(drawn, figure.svg.encode())
            shown.append(f"![{figure.title}](figures/{drawn.name})\n\n*{figure.note}*\n")
        save(document, TABLES.put(text, "\n".join([*shown, _as_markdown(tables, facts)])).encode())
    except OSError as error:
        raise UserError(f"--document: {disk_fault(error)}; choose a file that can be written") from None


def _as_markdown(tables: Sequence[ScoreTable], facts: Mapping[str, str]) -> str:
    said = "\n".join(f"- {name}: {what}" for name, what in facts.items())
    return "\n".join(map(markdown, tables)) + f"\n{said}\n"


def markdown(table: ScoreTable) -> str:
    """Return a table as Markdown."""

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rows = [[name, *(f"**{cell.text}**" if cell.bold else cell.text for cell in cells)] for name, cells in table.rows]
    lines = [f"## {table.title}", "", line(table.head), line(["---"] * len(table.head)), *map(line, rows), ""]
    return "\n".join([*lines, *(f"{note}\n" for note in table.notes)])


def latex(table: ScoreTable) -> str:
    """Return a table as LaTeX, for the package booktabs."""

    def line(cells: Sequence[ScoreCell]) -> str:
        texts = (cell.text.translate(_LATEX) for cell in cells)
        return " & ".join(rf"\textbf{{{text}}}" if cell.bold else text for cell, text in zip(cells, texts, strict=True))

    rows = [line([*map(ScoreCell, table.head)]), *(line([ScoreCell(name), *cells]) for name, cells in table.rows)]
    head, *body = [rf"{row} \\" for row in rows]
    caption = " ".join([f"{table.title}.", *table.notes]).translate(_LATEX)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}"
    lines = [r"\begin{table}", rf"\caption{{{caption}}}", begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}", ""])


Point = tuple[float, float, float, float]  # x, y, and the ends of its interval


@dataclass(frozen=True)
class ScoreFigure:
    """A figure: the name of its file, its title, what is said below it, and the drawing as SVG."""

    name: str
    title: str
    note: str
    svg: str


def figures_of(runs: Sequence[Measured]) -> list[ScoreFigure]:
    """Return the figures that the results of runs allow; one that would show a single point is left out.

    Args:
        runs: measured alike, as `compare` returns them.
    """
    figures, first = [], runs[0]
    steps = {run.name: _by_step(run) for run in runs}
    moves = any(len(of) > 1 for of in steps.values())
    bars = "Bars are 95 per cent intervals of each run alone; the tables have those of the differences."
    if averages := ruler_averages(first):
        title, by_length = next(iter(averages.items()))
        if len(by_length) > 1:
            lines = {run.name: [_score_point(run, of, length) for length, of in by_length] for run in runs}
            svg = _draw("by-length", lines, "tokens", "score", [length for length, _ in by_length])
            figures.append(ScoreFigure("score-by-length", f"RULER by length: {title.lower()}", bars, svg))
        length, average = by_length[-1]
        if moves:
            lines = {name: [_score_point(at, average, step) for step, at in of] for name, of in steps.items()}
            svg = _draw("by-step", lines, "training step", "score")
            note = f"Each checkpoint alone, at {length:,} tokens. {bars}"
            figures.append(ScoreFigure("score-by-step", "RULER against the training step", note, svg))
    if first.perplexity and moves:
        length = max(first.perplexity)
        lines = {name: [_perplexity_point(at, length, step) for step, at in of] for name, of in steps.items()}
        svg = _draw("perplexity", lines, "training step", "perplexity")
        note = f"Of all positions up to {length:,}. {bars}"
        figures.append(ScoreFigure("perplexity-by-step", "Perplexity against the training step", note, svg))
    return figures


def _by_step(run: Measured) -> list[tuple[int, Measured]]:
    """Return a run's results by step, ascending; of several seeds those of one step together."""
    steps = {result.checkpoint: result.step for result in run.results() if result.step is not None}
    return [
        (step, run.of_checkpoints([name for name, of in steps.items() if of == step]))
        for step in sorted({*steps.values()})
    ]


def _score_point(run: Measured, average: Average, x: float) -> Point:
    mean, low, high = interval_of(average.scores(run))
    return x, 100 * mean, 100 * low, 100 * high


def _perplexity_point(run: Measured, length: int, x: float) -> Point:
    results = run.perplexity[length]
    widths = [bucket.end - bucket.first for bucket in results[0].buckets]
    losses = np.average([[bucket.losses for bucket in of.buckets] for of in results], axis=1, weights=widths).mean(0)
    interval = student_interval(losses) or (float(losses.mean()),) * 3
    mean, low, high = (math.exp(min(loss, MOST_EXPONENT)) for loss in interval)
    return x, mean, low, high


def _draw(salt: str, lines: dict[str, list[Point]], across: str, up: str, lengths: Sequence[int] | None = None) -> str:
    """Return a drawing with a line for each run and the interval of each point, as SVG."""
    drawn = io.StringIO()
    with matplotlib.rc_context(figure_style(f"evaluation-{salt}")):
        canvas = Canvas(figsize=(6.4, 3.4), layout="constrained")
        axes = canvas.subplots()
        for i, (name, points) in enumerate(lines.items()):
            x, y, low, high = np.array(points).reshape(-1, 4).T
            shift = 1 + 0.012 * (i - (len(lines) - 1) / 2) if lengths else 1.0  # intervals must not hide one another
            style: dict[str, Any] = {"linewidth": 1.5, "marker": "o", "markersize": 3.5, "capsize": 2}
            axes.errorbar(x * shift, y, yerr=[y - low, high - y], color=SERIES[i % len(SERIES)], label=name, **style)
        if lengths:
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [format_length(length) for length in lengths])
        else:
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.minorticks_off()
        axes.legend()
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()
