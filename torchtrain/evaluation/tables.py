"""Tables as rich prints them, and as Markdown, LaTeX and HTML; and figures."""

import datetime
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure as Canvas

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault
from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page import figure_style, inline, render
from anchorline.page.figures import SERIES
from torchtrain.evaluation.intervals import MOST_EXPONENT, documents_interval, interval_of
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
    tables: Sequence[ScoreTable],
    facts: Mapping[str, str],
    folder: Path,
    command: str,
    figures: Sequence["ScoreFigure"] = (),
) -> None:
    """Write results.md, results.tex and results.html, and each figure as an SVG of its own.

    Raises:
        UserError: the folder cannot be written.
    """
    page = render(
        "torchtrain.evaluation",
        "page.html.j2",
        title="Results",
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        facts=facts,
        versions=versions(("anchorline", "torch", "transformers", "lm_eval")),
        tables=tables,
        figures=[(inline(figure.svg, figure.title), figure) for figure in figures],
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save(folder / "results.md", _as_markdown(tables, facts).encode())
        save(folder / "results.tex", "\n".join(map(latex, tables)).encode())
        save(folder / "results.html", page.encode())
        for figure in figures:
            save(folder / f"{figure.name}.svg", figure.svg.encode())
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def write_document(
    tables: Sequence[ScoreTable], facts: Mapping[str, str], document: Path, figures: Sequence["ScoreFigure"] = ()
) -> None:
    """Put the tables into a place of a Markdown file, and the figures, in `figures/` beside it, before them.

    Raises:
        UserError: as `read_marked`, or it cannot be written.
    """
    text = read_marked(document, [TABLES])
    shown = []
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

    def line(cells: Sequence[str]) -> str:
        return " & ".join(cells) + r" \\"

    rows = [
        [
            name.translate(_LATEX),
            *(
                rf"\textbf{{{cell.text.translate(_LATEX)}}}" if cell.bold else cell.text.translate(_LATEX)
                for cell in cells
            ),
        ]
        for name, cells in table.rows
    ]
    caption = " ".join([f"{table.title}.", *table.notes]).translate(_LATEX)
    return "\n".join(
        [
            r"\begin{table}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}",
            r"\toprule",
            line([name.translate(_LATEX) for name in table.head]),
            r"\midrule",
            *map(line, rows),
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


Point = tuple[float, float, float, float]  # x, y, and the ends of its interval


@dataclass(frozen=True)
class ScoreFigure:
    """A figure: the name of its file, its title, what is said below it, and the drawing as SVG."""

    name: str
    title: str
    note: str
    svg: str


def figures_of(runs: Sequence[Measured]) -> list[ScoreFigure]:
    """Return the figures that the results of runs allow: one that would hold nothing is left out.

    Args:
        runs: measured alike, as `compare` returns them.
    """
    figures, first = [], runs[0]
    bars = "Bars are 95 per cent intervals of each run alone; the tables have those of the differences."
    if told := ruler_averages(first):
        title, averages = told[0]
        held = [(n, of) for n, of in zip(first.lengths(), averages, strict=True) if of is not None]
        lines = {run.name: [_point(run, of, n) for n, of in held] for run in runs}
        if len(held) > 1:  # of one the table says as much
            svg = _draw("by-length", lines, "tokens", "score", [n for n, _ in held])
            figures.append(ScoreFigure("score-by-length", f"RULER by length: {title.lower()}", bars, svg))
        length, average = held[-1]
        lines = {run.name: [_point(of, average, step) for step, of in _by_step(run)] for run in runs}
        if any(len(points) > 1 for points in lines.values()):
            note = f"Each checkpoint alone, at {length:,} tokens. {bars}"
            svg = _draw("by-step", lines, "training step", "score")
            figures.append(ScoreFigure("score-by-step", "RULER against the training step", note, svg))
    if first.perplexity:
        length = max(first.perplexity)
        lines = {run.name: [_perplexity_point(of, length, step) for step, of in _by_step(run)] for run in runs}
        if any(len(points) > 1 for points in lines.values()):
            note = f"Of all positions up to {length:,}. {bars}"
            svg = _draw("perplexity", lines, "training step", "perplexity")
            figures.append(ScoreFigure("perplexity-by-step", "Perplexity against the training step", note, svg))
    return figures


def _by_step(run: Measured) -> list[tuple[float, Measured]]:
    """Return a run's results by step, ascending; of several seeds those of one step together."""
    results = (run.whole or run).results()
    steps = sorted({of.step for of in results if of.step is not None})
    return [(float(step), Measured(run.name).add(of for of in results if of.step == step)) for step in steps]


def _point(run: Measured, average: Average, x: float) -> Point:
    mean, low, high = interval_of(average.scores(run))
    return x, 100 * mean, 100 * low, 100 * high


def _perplexity_point(run: Measured, length: int, x: float) -> Point:
    each = []
    for result in run.perplexity[length]:
        widths = [of.end - of.first for of in result.buckets]
        each.append(np.average([of.losses for of in result.buckets], axis=0, weights=widths))
    losses = np.mean(each, axis=0)
    found = documents_interval(losses) or (float(losses.mean()),) * 3
    mean, low, high = (math.exp(min(loss, MOST_EXPONENT)) for loss in found)
    return x, mean, low, high


def _draw(salt: str, lines: dict[str, list[Point]], across: str, up: str, lengths: Sequence[int] | None = None) -> str:
    """Draw a line a run, with the interval of each point; runs lie a little beside one another."""
    drawn = io.StringIO()
    with matplotlib.rc_context(figure_style(f"evaluation-{salt}")):
        canvas = Canvas(figsize=(6.4, 3.4), layout="constrained")
        axes = canvas.subplots()
        for i, (name, points) in enumerate(lines.items()):
            if not points:
                continue
            x, y, low, high = zip(*points, strict=True)
            shift = 1 + 0.012 * (i - (len(lines) - 1) / 2) if lengths else 1.0
            bars = [[a - b for a, b in zip(y, low, strict=True)], [b - a for a, b in zip(y, high, strict=True)]]
            at, colour = [of * shift for of in x], SERIES[i % len(SERIES)]
            axes.errorbar(
                at, y, yerr=bars, color=colour, label=name, linewidth=1.5, marker="o", markersize=3.5, capsize=2
            )
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
