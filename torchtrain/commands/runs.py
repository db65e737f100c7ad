"""The verbs of a run: train, resume, status, verify."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anchorline.errors import UserError, print, quoted
from anchorline.files import resolve
from torchtrain.commands.arguments import MOST, ConfigFile, Overrides
from torchtrain.commands.ending import report_once

if TYPE_CHECKING:
    from torchtrain.config import Config


def train(
    file: ConfigFile,
    overrides: Overrides = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="if run.folder holds a run, rename it to FOLDER.replaced-N first")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="if run.folder holds a run of this config, go on with it; else begin")
    ] = False,
) -> None:
    """Train a model, and export it into run.folder as a Hugging Face folder.

    The run writes model/ (loads with AutoModelForCausalLM and AutoTokenizer), metrics.jsonl, loss.png, config.yaml with
    every default, and run.json. Converted models and tokens are kept in data.cache.

    Example: torchtrain train configs/demo.yaml train.steps=20 run.folder=runs/short

    On several GPUs, by the file's `distributed` section: torchrun --nproc_per_node 8 -m torchtrain train FILE

    A job that is started again by itself needs --resume: it begins where there is no run, goes on where there is one
    of the same config, and exits with 0 where the run is finished.
    """
    started = time.perf_counter()
    with report_once():
        from torchtrain.config import load_config

        if resume and replace:
            raise UserError("--resume and --replace exclude each other; remove one")
        config = load_config(file, overrides or [])
        if os.environ.get("RANK", "0") == "0":
            from torchtrain.run.folder import RunFolder

            # What is cheap to see is refused before the imports, which take seconds.
            folder = RunFolder(config.run.folder)
            if not (resume and folder.is_run()):
                folder.check(replace, config.model.source, config.data)
            _check_cheaply(config)

        from torchtrain.run.recipe import train as run  # isort: skip

        _run(lambda: run(config, replace=replace, resume=resume, started=started))


def _check_cheaply(config: "Config") -> None:
    """Refuse a missing package, and what a look at the model's folder and the documents shows."""
    from torchtrain.modeling.source import check_kept_length, check_source

    config.log.check_installed()
    check_source(config.model.source)
    check_kept_length(config.model.source, config.rope, config.pack.sequence_length)
    files = [None if source.files is None else Path(source.files).expanduser() for source in config.data.sources]
    if files and all(file is not None and file.is_file() and not file.stat().st_size for file in files):
        raise UserError(f"data.sources.0.files {quoted(str(files[0]))}: the file is empty; give one with documents")


def _run(run: Callable[[], Any]) -> None:
    from transformers.utils import logging

    from anchorline.terminal import Console
    from torchtrain.run.report import final_table

    # Our own checks replace the warnings of transformers.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    result = run()
    if result is None:  # on a rank above 0, or if the run was finished
        return
    out = Console()
    lines = [f"curves in {result.model.parent / 'loss.png'}", f"model in {result.model}"]
    if result.after.overall.tokens:
        out.print(final_table(result.before, result.after, result.tokens_seen, result.tokens_per_second))
        lines.insert(
            0, "loss: nats per token, of documents that no step saw; a change whose interval holds 0 may be chance"
        )
    for line in lines:
        out.print(line, markup=False, highlight=False, soft_wrap=True)


def resume(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the run's folder")],
    overrides: Overrides = None,
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, max=MOST, help="checkpoint to start from; 0 starts again; default: the last"),
    ] = None,
) -> None:
    """Resume a run after any interruption; the result is that of an uninterrupted run.

    With the same number of processes the result is the same bit by bit. With another number, or another distributed
    section, the run continues with the same rows and weights. Other changes that would move numbers are refused.

    Example: torchtrain resume runs/demo

    On several GPUs: torchrun --nproc_per_node 8 -m torchtrain resume FOLDER distributed.sequence_parallel=8
    """
    started = time.perf_counter()
    with report_once():
        from torchtrain.run.folder import RunFolder

        if not os.path.lexists(resolve("", folder) / "config.yaml"):
            raise UserError(f"{folder}: holds no run; give the run.folder of a run")
        config = RunFolder(folder).read_config(overrides or [])
        config = config.model_copy(update={"run": config.run.model_copy(update={"folder": str(folder)})})
        if os.environ.get("RANK", "0") == "0":
            RunFolder(folder).check_places(config.model.source, config.data)
            _check_cheaply(config)

        from torchtrain.run.recipe import resume as run  # isort: skip

        _run(lambda: run(config, step=step, started=started))


def export() -> None:
    """Say that there is nothing to do."""
    raise UserError(
        "export: there is no such command, because a run exports by itself: the trained model into model/ of its "
        "run.folder, and with save.last earlier ones into exports/; `torchtrain status FOLDER` lists them"
    )


def status(folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="the run's folder")]) -> None:
    """Print the progress of a run without changing it: steps, loss, time left, checkpoints, bad steps.

    Example: torchtrain status runs/demo
    """
    with report_once():
        from torchtrain.run.status import status_lines

        for line in status_lines(folder):
            print(line.replace("\n", "\\n"))


def verify(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a run's folder, or a token store's (cache/corpus/...)")
    ],
) -> None:
    """Check the digests of all files of a run (checkpoints, models, tokens) or of a token store.

    Exit code 0: all files are unchanged; 1: a file has changed.

    Example: torchtrain verify runs/demo
    """
    with report_once():
        from torchtrain.run.verify import verify_folder

        good = True
        for finding in verify_folder(folder):
            print(str(finding).replace("\n", "\\n"))
            good &= finding.good
        if not good:
            raise typer.Exit(1)
