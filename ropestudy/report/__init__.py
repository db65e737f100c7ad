"""What becomes of a study's `results.json`: tables, figures and a page of both. Nothing here computes attention.

`python -m ropestudy.report runs/study` makes them again from the file alone. `numbers` fills a page that is written by
hand, docs/precision.md, with the numbers of kept studies.
"""

from html import escape
from pathlib import Path

from anchorline.files import replace_file
from ropestudy.report.figures import FIGURES, write_figures
from ropestudy.report.tables import KINDS, TableRow, format_cell, make_tables, write_tables
from ropestudy.schema import Results

PAGE = "report.html"
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}"
    "table{border-collapse:collapse;font-size:12px}td,th{padding:.15em .6em;border-bottom:1px solid #8884;"
    "text-align:left;white-space:nowrap}div{overflow-x:auto;max-height:30em}img{max-width:100%;background:#fff}"
)

__all__ = ["write_report"]


def write_report(results: Results, folder: Path) -> Path:
    """Write `tables/*.csv`, `figures/*.png` and `report.html` into an existing folder; return the page's path."""
    tables = make_tables(results)
    write_tables(tables, folder / "tables")
    figures = write_figures(results, folder / "figures")
    page = folder / PAGE
    replace_file(page, _format_page(results, tables, figures).encode())
    return page


def _format_page(results: Results, tables: dict[str, list[TableRow]], figures: list[Path]) -> str:
    made = "the model" if not results.model.source else results.model.source
    facts = (
        f"{made}, {results.model.parameters:,} parameters rounded to {results.model.weights}; text "
        f"{results.text.source}; {results.environment.hardware}; {results.seconds:,.0f} s; {results.created}; commit "
        f"{results.environment.git_commit}"
    )
    parts = [f"<h1>{escape(results.title)}</h1><p>{escape(facts)}</p><p><code>{escape(results.command)}</code></p>"]
    for path in figures:
        caption = (FIGURES[path.stem].__doc__ or "").strip()
        parts.append(f'<h2>{escape(caption)}</h2><img src="figures/{path.name}" alt="{escape(caption)}">')
    for kind, rows in tables.items():
        head = "".join(f"<th>{escape(name)}</th>" for name in rows[0])
        lines = ["".join(f"<td>{escape(format_cell(row.get(name)))}</td>" for name in rows[0]) for row in rows]
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        link = f'<a href="tables/{kind}.csv">as CSV</a>'
        parts.append(f"<h2>{escape(KINDS[kind])} ({link})</h2><div><table><tr>{head}</tr>{body}</table></div>")
    start = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(results.title)}</title>'
    return f"{start}<style>{_STYLE}</style>{''.join(parts)}</html>\n"
