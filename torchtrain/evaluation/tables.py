"""Tables as rich prints them, and as Markdown, LaTeX and HTML."""

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anchorline.environment import versions
from anchorline.errors import UserError, disk_fault
from anchorline.files import save
from anchorline.marked import MarkedPlace, read_marked

if TYPE_CHECKING:
    from torchtrain.evaluation.figures import ScoreFigure

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
    from anchorline.page import inline, render

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
