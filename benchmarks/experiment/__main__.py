"""Run an experiment of docs/training-experiment.md, or what is left of it, and fill in that page.

    python -m benchmarks.experiment configs/experiments/offsets.yaml --out runs/offsets --workers 2 \\
        --results benchmarks/results/experiment-offsets.json --document docs/training-experiment.md

After an interruption the same command continues. Runs that the file of results holds are not repeated. `--workers 0`
only makes the tables again.
"""

from pathlib import Path
from typing import Annotated

import typer

from anchorline.command import Command
from benchmarks.experiment.report import write_report
from benchmarks.experiment.running import read_results, run_experiment
from benchmarks.experiment.spec import load_experiment

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command("experiment", cls=Command)
def main(
    file: Annotated[Path, typer.Argument(help="YAML, as configs/experiments/offsets.yaml")],
    out: Annotated[Path, typer.Option(help="folder of the runs")],
    results: Annotated[Path, typer.Option(help="file of measurements")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    workers: Annotated[int, typer.Option(min=0, help="runs at a time, of one thread each; 0: only the page")] = 1,
    document: Annotated[Path | None, typer.Option(help="a Markdown file whose results are filled in")] = None,
) -> None:
    """Train many small runs that differ only in arithmetic, mask and seed; measure what each recalls; compare them."""
    experiment = load_experiment(file, overrides or [])
    measured = read_results(experiment, results)
    if workers:
        run_experiment(experiment, out, measured, workers)
    write_report(experiment, measured.of(experiment), measured.bases, document, file.stem)


if __name__ == "__main__":
    app()
