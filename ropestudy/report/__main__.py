"""`python -m ropestudy.report STUDY...`: make a study's tables and figures again, keep the study in a compact file, or
fill a page that is written by hand with the numbers of kept studies.
"""

from pathlib import Path
from typing import Annotated

import typer

from anchorline.command import Command
from anchorline.files import replace_file
from ropestudy.report import write_report
from ropestudy.report.compact import read_study, write_compact
from ropestudy.report.numbers import Numbers, fill_page, make_numbers
from ropestudy.report.training import training_numbers
from ropestudy.schema import Results

KEPT = {
    "": "precision.json.xz",
    "second.": "precision-second.json.xz",
    "fp8.": "precision-fp8.json.xz",
}  # prefix of the keys, and the kept study they are made from
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
        results = read_study(study)
        if compact is not None:
            write_compact(results, compact)
        folder = out or (study if study.is_dir() else None)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_report(results, folder)
    if keys or page is not None:
        numbers = kept_numbers()
        if keys:
            for key, text in numbers.items():
                print(f"{key}: {text}")
        if page is not None:
            replace_file(page, fill_page(page.read_text(encoding="utf-8"), numbers).encode())


def kept_numbers() -> Numbers:
    """Return the numbers of all kept studies and of the training experiment in benchmarks/results."""
    studies = {key: text for prefix in KEPT for key, text in make_numbers(read_kept(prefix), prefix).items()}
    return studies | training_numbers(RESULTS / "training-experiment.json")


def read_kept(prefix: str) -> Results:
    """Read the kept study of a prefix."""
    return read_study(RESULTS / KEPT[prefix])


if __name__ == "__main__":
    app()
