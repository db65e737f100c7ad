"""`python -m ropestudy.report`: make a study's tables and figures again, or keep the study in a compact file."""

from pathlib import Path
from typing import Annotated

import typer

from anchorline.command import Command
from ropestudy.report import write_report
from ropestudy.schema import read_results, write_compact

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("report", cls=Command)
def report(
    study: Annotated[Path, typer.Argument(help="folder of a study, or the compact file of one")],
    out: Annotated[Path | None, typer.Option(help="folder of tables and figures; else the study's")] = None,
    compact: Annotated[Path | None, typer.Option(help="write the study here in a few hundred kilobytes")] = None,
) -> None:
    """Make a study's report again; nothing is computed."""
    results = read_results(study)
    if compact is not None:
        write_compact(results, compact)
    if out is not None or study.is_dir():
        write_report(results, out or study)


if __name__ == "__main__":
    app()
