"""The commands that try much at once: experiment, bench."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from anchorline.errors import UserError, quoted
from anchorline.files import resolve, resolve_folder
from torchtrain.commands.arguments import MOST, MOST_PROCESSES, Overrides
from torchtrain.commands.ending import one_speaks


def experiment(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="YAML, for example configs/experiments/rope_training.yaml")
    ],
    out: Annotated[Path, typer.Option("--out", help="folder of the runs, new or of the same experiment")],
    overrides: Overrides = None,
    workers: Annotated[int, typer.Option(min=1, max=MOST_PROCESSES, help="runs at work at a time")] = 1,
    launch: Annotated[
        str, typer.Option(help="what starts a run's processes, for example 'torchrun --standalone --nproc_per_node 8'")
    ] = "",
    stages: Annotated[int | None, typer.Option(min=1, max=MOST, help="stop after so many; default: all")] = None,
    document: Annotated[
        Path | None,
        typer.Option(help="a Markdown file, such as docs/training-experiment.md, whose numbers are made anew"),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(help="measurements.json of the same experiment elsewhere: what stands there is not run again"),
    ] = None,
    only_report: Annotated[bool, typer.Option("--only-report", help="train and measure nothing")] = False,
) -> None:
    """Train many runs that differ in arithmetic, mask and seed alone, measure each, and tell what made a difference.

    Interrupted, the same command goes on where it stopped. Leaves report.md, effects.svg, measurements.json in --out.

    Example: torchtrain experiment configs/experiments/rope_training.yaml --out runs/rope_training --workers 2
    """
    with one_speaks():
        from torchtrain.experiment.spec import load_experiment

        asked = load_experiment(file, overrides or [])

        from anchorline.marked import read_marked  # isort: skip
        from torchtrain.experiment.records import read_records
        from torchtrain.experiment.report import PLACE, write_report
        from torchtrain.experiment.running import receive, run_experiment

        folder = resolve_folder("--out", out)
        if document is not None:
            read_marked(document, [PLACE])  # before hours of work
        try:
            launcher = shlex.split(launch)
        except ValueError as error:
            raise UserError(f"--launch {quoted(launch)}: {error}; close what is quoted") from None
        records = None if measured is None else read_records(asked, resolve("--measured", measured))
        if only_report and records is not None:
            receive(asked, folder, records)
        if not only_report:
            run_experiment(
                asked,
                folder,
                workers,
                launcher,
                stages,
                lambda line: print(line, file=sys.stderr, flush=True),
                records,
            )
        print(f"report: {write_report(asked, folder, document)}")


def bench(
    what: Annotated[
        Literal["attention", "step", "memory"], typer.Argument(metavar="WHAT", help="attention, step or memory")
    ],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/bench/cpu.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of results")],
    overrides: Overrides = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", help="an earlier result, such as benchmarks/results/attention-cpu.json: what moved?"),
    ] = None,
) -> None:
    """Measure attention, steps or memory beside what people would use instead: tables and JSON in --out.

    Only ratios within one run are compared. An engine that gives other numbers than the error rule allows is not timed.
    Exit code 1: with --check, a ratio moved by more than the noise that was measured.

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
