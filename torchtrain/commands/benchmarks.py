"""The verb `torchtrain bench`."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from anchorline.errors import print
from torchtrain.commands.arguments import Overrides
from torchtrain.commands.ending import report_once


def bench(
    what: Annotated[Literal["attention", "step"], typer.Argument(metavar="WHAT", help="attention or step")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML config, for example configs/bench/cpu.yaml")],
    out: Annotated[Path, typer.Option("--out", help="folder of results")],
    overrides: Overrides = None,
) -> None:
    """Measure attention or steps against the alternatives; write tables and JSON into --out.

    Compare only ratios within one result. An engine that breaks the error rule is not timed.

    Example: torchtrain bench attention configs/bench/cpu.yaml --out runs/bench attention.lengths=[2048,4096]
    """
    with report_once():
        from torchtrain.bench.config import load_bench

        config = load_bench(file, overrides or [])

        from transformers.utils import logging

        from torchtrain.bench.result import run_bench

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        run_bench(what, config, out, lambda line: print(line, file=sys.stderr, flush=True))
