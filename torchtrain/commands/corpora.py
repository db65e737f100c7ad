"""The verbs of a corpus: prepare, stats."""

from pathlib import Path
from typing import Annotated

import typer

from torchtrain.commands.arguments import Overrides
from torchtrain.commands.ending import report_once


def prepare(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="YAML config, for example configs/data/slimpajama-64k.yaml; or a run's"),
    ],
    out: Annotated[Path, typer.Option("--out", help="a new folder for the store, or the folder of the same store")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="with prepare.executor slurm: only print the script; submit and write nothing"),
    ] = False,
) -> None:
    """Tokenise a corpus into a store, in parallel; after an interruption, the same command continues.

    Writes the store and its statistics into --out. Runs read the store with data.prepared. Tokens, order and
    fingerprint do not depend on prepare.executor: local, slurm or ray.

    Example: torchtrain prepare configs/data/slimpajama-128k.yaml --out data/slimpajama-128k prepare.workers=32
    """
    with report_once():
        from torchtrain.config import load_preparation

        preparation = load_preparation(file, overrides or [])

        # First, so that our message reports a missing torch.
        from torchtrain.commands.statistics import prepare_corpus  # isort: skip

        prepare_corpus(preparation, out, dry_run)


def stats(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a token store's, from `torchtrain prepare` or a run's")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="folder to write to; default: the store's folder")] = None,
    lengths: Annotated[
        list[int] | None,
        typer.Option("--sequence-length", min=2, max=2**24, help="tokens a row; may be given more than once"),
    ] = None,
) -> None:
    """Describe a token store: domains, lengths, the mixture's changes, and the share of attention that packing leaves.

    Writes statistics.json, which holds more than the table.

    Example: torchtrain stats data/slimpajama-128k --sequence-length 131072
    """
    with report_once():
        from torchtrain.commands.statistics import print_statistics

        print_statistics(folder, out or folder, lengths or ())
