"""The verbs `torchtrain experiment` and `torchtrain bench`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from anchorline.files import resolve, resolve_folder
from torchtrain.commands.arguments import MOST_PROCESSES, Overrides
from torchtrain.commands.ending import one_speaks


def experiment(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML, as configs/experiments/relativity.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of the runs, new or of the same experiment")],
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="runs at a time, of one thread each")] = 1,
    results: Annotated[
        Path | None,
        typer.Option(help="the file of measurements; runs that it holds are not repeated [default: OUT/results.json]"),
    ] = None,
    document: Annotated[
        Path | None, typer.Option(help="a Markdown file, as docs/training-experiment.md, whose results are filled in")
    ] = None,
) -> None:
    """Train many small runs that differ only in arithmetic, mask and seed; measure what each recalls; compare them.

    After an interruption the same command continues.

    Example: torchtrain experiment configs/experiments/relativity.yaml --out runs/relativity --workers 2
    """
    with one_speaks():
        from torchtrain.experiment.spec import load_experiment

        asked = load_experiment(file, overrides or [])

        from torchtrain.experiment.measurements import read_measurements
        from torchtrain.experiment.report import write_report
        from torchtrain.experiment.running import Folder, run_experiment

        folder = Folder(resolve_folder("--out", out))
        measured = read_measurements(asked, resolve("--results", results or folder.path / "results.json"))
        run_experiment(asked, folder, measured, workers, lambda line: print(line, file=sys.stderr, flush=True))
        print(f"report: {write_report(asked, measured.of(asked), folder.path, document)}")


def bench(
    what: Annotated[Literal["attention", "step"], typer.Argument(metavar="WHAT", help="attention or step")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/bench/cpu.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of results")],
    overrides: Overrides = None,
) -> None:
    """Measure attention or steps against the alternatives; write tables and JSON into --out.

    Only ratios within one run are compared. An engine that breaks the error rule is not timed.

    Example: torchtrain bench attention configs/bench/cpu.yaml --out runs/bench attention.lengths=[2048,4096]
    """
    with one_speaks():
        from torchtrain.bench.config import load_bench

        config = load_bench(file, overrides or [])

        from transformers.utils import logging

        from torchtrain.bench.result import run_bench

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        run_bench(what, config, out, lambda line: print(line, file=sys.stderr, flush=True))
