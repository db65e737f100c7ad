"""Tables as rich prints them, and as Markdown and LaTeX; and figures."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure as Canvas

from anchorline.errors import UserError, disk_fault
from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked
from anchorline.page.figures import SERIES, draw_svg
from torchtrain.evaluation.intervals import MOST_EXPONENT, interval_of, student_interval
from torchtrain.evaluation.measured import Average, Measured, format_length, ruler_averages

TABLES = MarkedPlace("<!-- made by torchtrain compare -->", "<!-- end of torchtrain compare -->")  # of a document
_LATEX = str.maketrans({c: f"\\{c}" for c in "#$%&_{}"} | {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}"})
_BARS = "Bars are 95 per cent intervals of each run alone; the tables have those of the differences."


_Point = tuple[str, float, Measured, Average]  # name of its line, place across, and what its score is


class ScoreTable(NamedTuple):
    """A table: title, heads of columns, rows of cells by name (`**26.0**`: a difference was shown), and notes."""

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
    from rich.table import Table as RichTable
    from rich.text import Text

    from anchorline.terminal import Console

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
    """Write results.md, results.tex and figures; `facts`: a line about each run. Raises UserError: it cannot."""
    texts = {"results.md": _as_markdown(tables, facts), "results.tex": "\n".join(map(_as_latex, tables))}
    texts |= {f"{figure.name}.svg": figure.svg for figure in figures}
    _save("--out", {folder / name: text for name, text in texts.items()})


def write_document(
    tables: Sequence[ScoreTable], facts: Mapping[str, str], document: Path, figures: Sequence[ScoreFigure] = ()
) -> None:
    """Put figures and tables between a Markdown file's marks, drawings into `figures/`. Raises UserError: it cannot."""
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
    lines, told = [], set[str]()  # a note is written below the first table that it belongs to
    for table in tables:
        notes = [note for note in table.notes if note not in told]
        told.update(notes)
        rows = [table.head, ["---"] * len(table.head), *([name, *cells] for name, cells in table.rows)]
        cells = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
        lines += [f"## {table.title}", "", *cells, "", *(f"{note}\n" for note in notes)]
    return "\n".join([*lines, *(f"- {name}: {what}" for name, what in facts.items()), ""])


def _as_latex(table: ScoreTable) -> str:
    def cell(text: str) -> str:
        plain = text.strip("*").translate(_LATEX)
        return rf"\textbf{{{plain}}}" if text.startswith("**") else plain

    rows = (table.head, *([name, *cells] for name, cells in table.rows))
    head, *body = [" & ".join(map(cell, row)) + r" \\" for row in rows]
    caption = " ".join([f"{table.title}.", *table.notes]).translate(_LATEX)
    begin = rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}"
    lines = [r"\begin{table}", rf"\caption{{{caption}}}", begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([*lines, r"\end{tabular}", r"\end{table}", ""])


def figures_of(runs: Sequence[Measured]) -> list[ScoreFigure]:
    """Return the figures that results of runs measured alike allow, but those that would show a single point."""
    figures = []
    steps = [sorted({of.step for of in run.results() if of.step is not None}) for run in runs]
    by_step = [(run, step) for run, each in zip(runs, steps, strict=True) for step in each]
    moves = any(len(each) > 1 for each in steps)

    def add(name: str, title: str, note: str, across: str, points: Sequence[_Point]) -> None:
        svg = draw_svg(f"evaluation-{name}", partial(_draw, points, across, name.partition("-")[0]))
        figures.append(ScoreFigure(name, title, f"{note}{_BARS}", svg))

    def add_by_step(name: str, title: str, note: str, average: Average) -> None:
        points = [(run.name, step, run.of_step(step), average) for run, step in by_step]
        add(f"{name}-by-step", f"{title} against the training step", note, "training step", points)

    for title, by_length in [*ruler_averages(runs[0]).items()][:1]:
        if len(by_length) > 1:
            points = [(run.name, length, run, average) for run in runs for length, average in by_length.items()]
            add("score-by-length", f"RULER by length: {title.lower()}", "", "tokens", points)
        if moves:
            length = max(by_length)
            add_by_step("score", "RULER", f"Each checkpoint alone, at {length:,} tokens. ", by_length[length])
    if moves and (lengths := [length for task, length in runs[0].tasks if task == "perplexity"]):
        whole = Average([("perplexity", max(lengths))], part=f"1 to {max(lengths) - 1:,}")
        add_by_step("perplexity", "Perplexity", f"Of all positions up to {max(lengths):,}. ", whole)
    return figures


def _draw(points: Sequence[_Point], across: str, up: str, canvas: Canvas) -> None:
    axes, names = canvas.subplots(), [*dict.fromkeys(point[0] for point in points)]
    for i, name in enumerate(names):
        x, y, low, high = np.array([(x, *_interval(run, of)) for label, x, run, of in points if label == name]).T
        shift = 1 + 0.012 * (i - (len(names) - 1) / 2) if across == "tokens" else 1.0  # intervals must not overlap
        style = {"color": SERIES[i % len(SERIES)], "linewidth": 1.5, "marker": "o", "markersize": 3.5, "capsize": 2}
        axes.errorbar(x * shift, y, yerr=[y - low, high - y], label=name, **style)
    if across == "tokens":
        axes.set_xscale("log", base=2)
        lengths = sorted({int(x) for _, x, *_ in points})
        axes.set_xticks(lengths, [format_length(length) for length in lengths])
    else:
        axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel=across, ylabel=up)
    axes.minorticks_off()
    axes.legend()


def _interval(run: Measured, average: Average) -> np.ndarray:
    scores = average.scores(run)
    if average.is_loss:
        return np.exp(np.minimum(student_interval(scores[0]) or (scores[0].mean(),) * 3, MOST_EXPONENT))
    return 100 * np.array(interval_of(scores))
