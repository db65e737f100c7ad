"""The verbs of a corpus: prepare, stats."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anchorline.errors import print, quoted
from anchorline.files import read_json, resolve_folder
from torchtrain.commands.arguments import Overrides
from torchtrain.commands.ending import report_once

if TYPE_CHECKING:
    from torchtrain.config import Preparation


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

        _prepare(load_preparation(file, overrides or []), resolve_folder("--out", out), dry_run)


def _prepare(preparation: "Preparation", out: Path, dry_run: bool) -> None:
    """Make the store of a preparation in a folder, and print its statistics. dry_run: print Slurm's script alone."""
    from anchorline.terminal import Console
    from torchtrain import data
    from torchtrain.commands.statistics import print_statistics
    from torchtrain.data.prepare import Submitted
    from torchtrain.modeling.source import open_tokenizer, resolve_source
    from torchtrain.run.report import make_progress_printer

    console = Console(stderr=True)
    log = partial(console.print, soft_wrap=True, markup=False, highlight=False)
    settings, trusted = preparation.tokenizer, preparation.tokenizer.trust_remote_code
    cache = preparation.data.cache
    source = resolve_source(settings.source, cache, log, needs="tokenizer", trust_remote_code=trusted)
    tokenizer = open_tokenizer(source, trusted)
    rows = read_json(Path(source, "config.json"), "tokenizer.source").get("vocab_size")
    if added := data.check_tokenizer(tokenizer, rows if isinstance(rows, int) else len(tokenizer), source):
        log(f"warning   {added}")
    for number, one in enumerate(preparation.data.sources):
        if one.dataset is not None and one.revision is None and not Path(one.dataset).is_dir():
            has = f"data.sources.{number}: dataset {quoted(one.dataset)} has no revision"
            log(f"unpinned  {has}, so it may change; give a commit")
    with console.status("looking at the sources") as spinner:
        on_progress = make_progress_printer(console, spinner, log)
        made = data.prepare_store(preparation, tokenizer, out, log, on_progress, dry_run)
    if not isinstance(made, Submitted):
        print_statistics(made.folder, made.folder)
        print(f"store in {made.folder}")
    elif made.script is not None:
        print(made.script, end="")
    else:
        log(f"submitted {made.tasks:,} tasks; when they are done, run the same command again: it joins them")


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
