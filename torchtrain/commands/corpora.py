"""The commands of a corpus: prepare, stats."""

from pathlib import Path
from typing import Annotated

import typer

from torchtrain.commands.arguments import Overrides
from torchtrain.commands.ending import one_speaks


def prepare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML config, for example configs/data/slimpajama-64k.yaml; or a run's"),
    ],
    out: Annotated[Path, typer.Option("--out", help="the store's folder, which is new; or that of the same store")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="of prepare.executor slurm: print the script, submit and write nothing")
    ] = False,
) -> None:
    """Tokenise a corpus into a store, with as many processes as there are; interrupted, it goes on where it was.

    Writes into --out the store, which runs read by data.prepared, and its statistics. Tokens, order and fingerprint are
    the same whoever does the work: prepare.executor is local, slurm or ray.

    Example: torchtrain prepare configs/data/slimpajama-128k.yaml --out data/slimpajama-128k prepare.workers=32
    """
    with one_speaks():
        from torchtrain.config import load_preparation

        preparation = load_preparation(file, overrides or [])

        # First, so that a missing torch is reported in our words.
        from torchtrain.run.statistics import prepare_store  # isort: skip

        prepare_store(preparation, out, dry_run)


def stats(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a token store's, from `torchtrain prepare` or a run's")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="where to write; default: the store's folder")] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--sequence-length", min=2, max=2**24, help="tokens a row; may be given more than once"),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="whose FLOPs tell what a step gains: a folder or hub id")
    ] = "meta-llama/Llama-2-7b-hf",
) -> None:
    """Tell what a token store holds: domains, lengths, what a mixture changed, how much of attention packing leaves.

    Writes statistics.json and statistics.html.

    Example: torchtrain stats data/slimpajama-128k --sequence-length 131072
    """
    with one_speaks():
        from torchtrain.run.statistics import show, write_statistics

        show(write_statistics(folder, out or folder, lengths or (), model))
