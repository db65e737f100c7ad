"""Tables as rich prints them, and as Markdown and LaTeX; and figures."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
_BARS = "Bars are 95 per cent intervals of each run alone; the tables have those of the differences."


@dataclass(frozen=True)
class ScoreTable:
    """A table: its title, the heads of its columns, rows of cells by name, and what is said below it.

    A cell is bold (`**26.0**`) where a difference was shown.
    """

    title: str
    head: list[str]
    rows: list[tuple[str, list[str]]]
    notes: list[str]


class ScoreFigure(NamedTuple):
    """A figure: the name of its file, its title, what is said below it, and the drawing as SVG."""

    name: str
    title: str
    note: str
    svg: str


def print_tables(tables: Sequence[ScoreTable]) -> None:
    """Print tables for a person."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console()
    console.width = max(console.width, 160)  # of a narrow terminal lines go on below: no number is cut
    for table in tables:
        shown = RichTable(*table.head, box=box.SIMPLE)
        for name, cells in table.rows:
            shown.add_row(Text(name), *(Text(cell.strip("*"), style="bold" * cell.startswith("*")) for cell in cells))
        console.print(Text(table.title, style="italic"), shown)
        for note in table.notes:
            console.print(note, markup=False, soft_wrap=True, highlight=False)


def write_tables(
    tables: Sequence[ScoreTable], facts: Mapping[str, str], folder: Path, figures: Sequence[ScoreFigure] = ()
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
    _save("--out", {folder / name: text for name, text in texts.items()})


def write_document(
    tables: Sequence[ScoreTable], facts: Mapping[str, str], document: Path, figures: Sequence[ScoreFigure] = ()
) -> None:
    """Put figures and tables between the marks of a Markdown file; the drawings go into `figures/` next to it.

    Raises:
        UserError: as `read_marked`, or it cannot be written.
    """
    drawn = {f"figures/{document.stem}-{figure.name}.svg": figure for figure in figures}
    shown = [f"![{figure.title}]({place})\n\n*{figure.note}*\n" for place, figure in drawn.items()]
    text = TABLES.put(read_marked(document, [TABLES]), "\n".join([*shown, _as_markdown(tables, facts)]))
    _save("--document", {document.parent / place: of.svg for place, of in drawn.items()} | {document: text})


def _save(option: str, texts: Mapping[Path, str]) -> None:
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, text.encode())
    except OSError as error:
        raise UserError(f"{option}: {disk_fault(error)}; choose a place that can be written") from None


def _as_markdown(tables: Sequence[ScoreTable], facts: Mapping[str, str]) -> str:
    said = "\n".join(f"- {name}: {what}" for name, what in facts.items())
    return "\n".join(map(markdown, tables)) + f"\n{said}\n"


def markdown(table: ScoreTable) -> str:
    """Return a table as Markdown."""
    rows = [table.head, ["---"] * len(table.head), *([name, *cells] for name, cells in table.rows)]
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([f"## {table.title}", "", *lines, "", *(f"{note}\n" for note in table.notes)])


def latex(table: ScoreTable) -> str:
    """Return a table as LaTeX, for the package booktabs."""

    def cell(text: str) -> str:
        plain = text.strip("*").translate(_LATEX)
        return rf"\textbf{{{plain}}}" if text.startswith("**") else plain

    head, *body = [
        " & ".join(map(cell, row)) + r" \\" for row in (table.head, *([name, *cells] for name, cells in table.rows))
    ]
    caption = " ".join([f"{table.title}.", *table.notes]).translate(_LATEX)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}"
    lines = [r"\begin{table}", rf"\caption{{{caption}}}", begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}", ""])


def figures_of(runs: Sequence[Measured]) -> list[ScoreFigure]:
    """Return the figures that the results of runs allow; one that would show a single point is left out.

    Args:
        runs: measured alike, as `compare` returns them.
    """
    figures, first = [], runs[0]
    steps = {run.name: _by_step(run) for run in runs}
    moves = any(len(of) > 1 for of in steps.values())

    def add(name: str, title: str, note: str, across: str, lines: dict[str, list[_Point]]) -> None:
        figures.append(ScoreFigure(name, title, note, _draw(name, lines, across, name.partition("-")[0])))

    if averages := ruler_averages(first):
        title, by_length = next(iter(averages.items()))
        if len(by_length) > 1:
            lines = {run.name: [_score(run, of, length) for length, of in by_length.items()] for run in runs}
            add("score-by-length", f"RULER by length: {title.lower()}", _BARS, "tokens", lines)
        if moves:
            length, average = [*by_length.items()][-1]
            lines = {name: [_score(at, average, step) for step, at in of] for name, of in steps.items()}
            note = f"Each checkpoint alone, at {length:,} tokens. {_BARS}"
            add("score-by-step", "RULER against the training step", note, "training step", lines)
    if moves and (lengths := [length for task, length in first.tasks if task == "perplexity"]):
        key = ("perplexity", max(lengths))
        whole = Average([key], part=f"1 to {key[1] - 1:,}")
        lines = {name: [_perplexity(at, whole, step) for step, at in of] for name, of in steps.items()}
        note = f"Of all positions up to {key[1]:,}. {_BARS}"
        add("perplexity-by-step", "Perplexity against the training step", note, "training step", lines)
    return figures


def _by_step(run: Measured) -> list[tuple[int, Measured]]:
    """Return a run's results by step, ascending; of several seeds those of one step together."""
    steps = {result.checkpoint: result.step for result in run.results() if result.step is not None}
    return [
        (step, run.of_checkpoints([name for name, of in steps.items() if of == step]))
        for step in sorted({*steps.values()})
    ]


_Point = tuple[float, float, float, float]  # x, y, and the ends of its interval


def _score(run: Measured, average: Average, x: float) -> _Point:
    mean, low, high = interval_of(average.scores(run))
    return x, 100 * mean, 100 * low, 100 * high


def _perplexity(run: Measured, average: Average, x: float) -> _Point:
    (losses,) = average.scores(run)
    interval = student_interval(losses) or (float(losses.mean()),) * 3
    mean, low, high = (math.exp(min(loss, MOST_EXPONENT)) for loss in interval)
    return x, mean, low, high


def _draw(name: str, lines: dict[str, list[_Point]], across: str, up: str) -> str:
    """Return a drawing with a line for each run and the interval of each point, as SVG."""
    drawn = io.StringIO()
    with matplotlib.rc_context(figure_style(f"evaluation-{name}")):
        canvas = Canvas(figsize=(6.4, 3.4), layout="constrained")
        axes = canvas.subplots()
        for i, (run, points) in enumerate(lines.items()):
            x, y, low, high = np.array(points).reshape(-1, 4).T
            shift = 1 + 0.012 * (i - (len(lines) - 1) / 2) if across == "tokens" else 1.0  # intervals must not overlap
            axes.errorbar(
                x * shift,
                y,
                yerr=[y - low, high - y],
                color=SERIES[i % len(SERIES)],
                label=run,
                linewidth=1.5,
                marker="o",
                markersize=3.5,
                capsize=2,
            )
        if across == "tokens":
            axes.set_xscale("log", base=2)
            lengths = [int(point[0]) for point in next(iter(lines.values()))]
            axes.set_xticks(lengths, [format_length(length) for length in lengths])
        else:
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel=across, ylabel=up)
        axes.minorticks_off()
        axes.legend()
        canvas.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return drawn.getvalue()
