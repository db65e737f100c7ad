"""Render a finished study again from its results.json: `python -m ropestudy.report runs/study`; or from the compact
file of one.
"""

from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import typer

from anchorline.command import Command
from anchorline.errors import UserError
from ropestudy.report import write_report
from ropestudy.report.compact import read_study, write_compact
from ropestudy.report.docs import refresh
from ropestudy.schema import Results

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("study", cls=Command)
def render(
    folder: Annotated[
        Path,
        typer.Argument(
            help="folder of a study; its results.json is read, the page is written there. Or a file that --compact "
            "wrote: then --document alone is made"
        ),
    ],
    beside: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of a study of the same model on the same text (parity_tests.study): shown in the same page"
        ),
    ] = None,
    second: Annotated[
        list[Path] | None,
        typer.Option(
            help="folder of a study of another model, whose tables follow in the document; several are merged"
        ),
    ] = None,
    document: Annotated[
        Path | None,
        typer.Option(help="a Markdown file, such as docs/precision.md, whose numbers and figures are made anew"),
    ] = None,
    compact: Annotated[
        Path | None,
        typer.Option(help="write what was measured here, in a few hundred kilobytes: every text's own numbers"),
    ] = None,
) -> None:
    """Render a finished study again; nothing is computed."""
    results = read_study(folder)
    for other in beside or []:
        results = merge_results(results, read_study(other))
    if compact is not None:
        write_compact(results, compact)
    if document is not None:
        others = [read_study(other) for other in second or []]
        refresh(results, document, reduce(merge_results, others) if others else None)
    if folder.is_dir():
        print(write_report(results, folder))


def merge_results(results: Results, other: Results) -> Results:
    """Return the first study with the records of the second.

    Raises UserError: they are not of the same weights in the same dtype, or do not read the same text: its first
    documents, BOS and seed.
    """
    count = min(len(results.text.documents), len(other.text.documents))
    for what, mine, theirs in (
        ("model", results.model.sha256, other.model.sha256),
        ("model.weights", results.model.weights, other.model.weights),
        ("seed", _said(results, "seed"), _said(other, "seed")),
        ("text.bos", _said(results, "text", "bos"), _said(other, "text", "bos")),
        ("BOS", results.text.bos, other.text.bos),
        ("text", results.text.documents[:count], other.text.documents[:count]),
    ):
        if mine != theirs:
            raise UserError(f"--beside: {other.title!r} is of another {what}; give a study of the same")
    sections = {name: value for name, value in other.config.items() if value is not None}
    return results.model_copy(
        update={
            "records": [*results.records, *other.records],
            "config": sections | {name: value for name, value in results.config.items() if value is not None},
            "command": "\n".join(dict.fromkeys([*results.command.split("\n"), other.command])),
            "seconds": results.seconds + other.seconds,
            "cells": other.cells | {name: n for name, n in results.cells.items() if n[0] or name not in other.cells},
            "model": results.model.model_copy(
                update={"initialisations": results.model.initialisations | other.model.initialisations}
            ),
        }
    )


def _said(results: Results, *keys: str) -> Any:
    """What its configuration says of a field; None if nothing."""
    found: Any = results.config
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return found


if __name__ == "__main__":
    app()
