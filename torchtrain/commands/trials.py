"""The commands that try much at once: experiment, bench."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from anchorline.files import resolve, resolve_folder
from torchtrain.commands.arguments import MOST, MOST_PROCESSES, Overrides
from torchtrain.commands.ending import one_speaks


def experiment(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML, as configs/experiments/relativity.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of the runs, new or of the same experiment")],
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="runs at a time, of one thread each")] = 1,
    seeds: Annotated[int | None, typer.Option(min=1, max=MOST, help="the first so many; default: all")] = None,
    results: Annotated[
        Path | None,
        typer.Option(help="a file of measurements: what it holds is not run again, what is measured is added to it"),
    ] = None,
    document: Annotated[
        Path | None, typer.Option(help="a Markdown file, as docs/training-experiment.md, whose results are filled in")
    ] = None,
    only_report: Annotated[bool, typer.Option("--only-report", help="train nothing; report what is measured")] = False,
) -> None:
    """Train many small runs that differ only in arithmetic, mask and seed; measure what each recalls; compare them.

    After an interruption the same command continues.

    Example: torchtrain experiment configs/experiments/relativity.yaml --out runs/relativity --workers 2
    """
    with one_speaks():
        from torchtrain.experiment.spec import load_experiment

        asked = load_experiment(file, overrides or [])

        from torchtrain.experiment.report import write_report
        from torchtrain.experiment.running import Folder, run_experiment, share

        folder = Folder(resolve_folder("--out", out))
        kept = None if results is None else resolve("--results", results)
        if kept is not None:
            share(asked, folder, kept)
        if not only_report:
            try:
                run_experiment(asked, folder, workers, seeds, lambda line: print(line, file=sys.stderr, flush=True))
            finally:
                if kept is not None:
                    share(asked, folder, kept)
        print(f"report: {write_report(asked, folder, document)}")


def bench(
    what: Annotated[Literal["attention", "step"], typer.Argument(metavar="WHAT", help="attention or step")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/bench/cpu.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of results")],
    overrides: Overrides = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="compare with an earlier result, such as benchmarks/results/attention-cpu.json"),
    ] = None,
) -> None:
    """Measure attention or steps against the alternatives; write tables and JSON into --out.

    Only ratios within one run are compared. An engine that breaks the error rule is not timed.
    Exit code 1: with --check, a ratio moved by more than the measured noise.

    Example: torchtrain bench attention configs/bench/cpu.yaml --out runs/bench attention.lengths=[2048,4096]
    """
    with one_speaks():
        from torchtrain.bench.config import load_bench

        config = load_bench(file, overrides or [])

        from transformers.utils import logging

        from torchtrain.bench.result import run_bench

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        moved = run_bench(what, config, out, check, lambda line: print(line, file=sys.stderr, flush=True))
        for line in moved:
            print(f"moved     {line}")
        if check is not None:
            print(f"checked   against {check}: {len(moved)} moved")
        print(f"results in {resolve('--out', out)}")
        if moved:
            raise typer.Exit(1)
