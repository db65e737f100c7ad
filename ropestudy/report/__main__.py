"""`python -m ropestudy.report`: make a study's tables and figures again, keep the study in a compact file, or fill
docs/precision.md with the numbers of the kept studies. Nothing is computed.
"""

from pathlib import Path
from typing import Annotated

import typer

from anchorline.command import Command
from anchorline.files import replace_file
from ropestudy.report import write_report
from ropestudy.report.numbers import Numbers, fill_page, make_numbers
from ropestudy.report.training import training_numbers
from ropestudy.schema import read_results, write_compact

# The prefix of keys, and the kept study that they are made from.
KEPT = {"": "precision.json.xz", "second.": "precision-second.json.xz", "fp8.": "precision-fp8.json.xz"}
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("report", cls=Command)
def report(
    study: Annotated[Path | None, typer.Argument(help="folder of a study, or the compact file of one")] = None,
    out: Annotated[Path | None, typer.Option(help="folder of tables and figures; else the study's")] = None,
    compact: Annotated[Path | None, typer.Option(help="write the study here in a few hundred kilobytes")] = None,
    page: Annotated[Path | None, typer.Option(help="a Markdown file to fill with the kept studies' numbers")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="print the key and the text of every number")] = False,
) -> None:
    """Make a study's report again; nothing is computed."""
    if study is not None:
        results = read_results(study)
        if compact is not None:
            write_compact(results, compact)
        if out is not None or study.is_dir():
            write_report(results, out or study)
    if page is not None:
        replace_file(page, fill_page(page.read_text(encoding="utf-8"), kept_numbers()).encode())
    for key, text in kept_numbers().items() if keys else ():
        print(f"{key}: {text}")


def kept_numbers() -> Numbers:
    """Return the numbers of all kept studies and of the training experiment in benchmarks/results."""
    numbers = training_numbers(RESULTS / "training-experiment.json")
    for prefix, name in KEPT.items():
        numbers |= make_numbers(read_results(RESULTS / name), prefix)
    return numbers


if __name__ == "__main__":
    app()
