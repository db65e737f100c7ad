"""The verb `torchtrain prepare`: a tokenizer found, a store made, its statistics written and shown."""

from pathlib import Path

from rich.console import Console

from anchorline.errors import quoted
from anchorline.files import resolve_folder
from torchtrain.config import Preparation
from torchtrain.data.produce import Submitted, produce
from torchtrain.modeling.source import open_tokenizer, resolve_source
from torchtrain.run.report import make_progress_printer
from torchtrain.run.statistics import show, write_statistics


def prepare_store(preparation: Preparation, out: Path, dry_run: bool = False) -> None:
    """Make the store of a preparation in a folder, and tell what came of it.

    Args:
        preparation: what of, and by whom.
        out: the store's folder.
        dry_run: print Slurm's script and write nothing.

    Raises:
        UserError: as `torchtrain.data.produce.produce`.
        TasksUnfinished: a worker was killed.
    """
    console, told = Console(stderr=True), Console()

    def log(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False, highlight=False)

    out = resolve_folder("--out", out)
    settings = preparation.tokenizer
    source = resolve_source(
        settings.source, preparation.data.cache, log, needs="tokenizer", trust_remote_code=settings.trust_remote_code
    )
    tokenizer = open_tokenizer(source, settings.trust_remote_code)
    for number, one in enumerate(preparation.data.sources):
        if one.dataset is not None and one.revision is None and not Path(one.dataset).is_dir():
            log(
                f"unpinned  data.sources.{number}: dataset {quoted(one.dataset)} has no revision, so it may be another "
                "tomorrow; give a commit"
            )
    with console.status("looking at the sources") as spinner:
        report_progress = make_progress_printer(console, spinner, log)
        made = produce(preparation, tokenizer, out, log, report_progress, dry_run)
    if isinstance(made, Submitted):
        if made.script is not None:
            print(made.script, end="")
        else:
            log(f"submitted {made.tasks:,} tasks; when they are done, run the same command again: it joins them")
        return
    show(write_statistics(made.folder, made.folder))
    told.print(f"store in {made.folder}", markup=False, soft_wrap=True)
