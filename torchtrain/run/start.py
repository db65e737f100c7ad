"""How a run gets its folder: a new run makes it, a resumed run goes back to a checkpoint in it. Every rank calls these
functions alike, rank 0 writes, and nothing is made or removed before the run is set up.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from anchorline.errors import UserError
from anchorline.files import FileEntry, entry_of
from torchtrain.checkpoint.identity import check_config, describe_changes
from torchtrain.checkpoint.manifest import Manifest, ProcessLayout
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config
from torchtrain.distributed.world import World
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import hold
from torchtrain.run.setup import Setup, Start
from torchtrain.training.events import NOTHING, has_beginning, rewind_metrics

Log = Callable[[str], None]


def make_folder(
    config: Config, setup: Setup, folder: RunFolder, world: World, replace: bool, locks: ExitStack, log: Log
) -> None:
    """Make a new run's folder (replace: rename a run in it to FOLDER.replaced-N), and hold its lock as long as `locks`
    last. Raises UserError, OtherRankFailed: it cannot be made; then there is none.
    """
    with world.together():
        if world.rank == 0:
            replaced = locks.enter_context(folder.create(config, setup.record, replace))
            _note_start(folder, 0, setup)
            if replaced is not None:
                log(f"replaced  the old run is in {replaced}")
    _check_shared(folder, world)


def find_start(
    config: Config, folder: RunFolder, world: World, step: int | None, locks: ExitStack, log: Log
) -> Start | None:
    """Take the folder of a run that resumes, for as long as `locks` last, and choose the checkpoint from which it does;
    None if it is finished.

    step: of the checkpoint; 0 begins anew; None is the last.
    Raises UserError, OtherRankFailed: there is no run, its config is another, or a checkpoint is damaged.
    """
    with world.together():
        if world.rank == 0:
            folder.check_run()
            locks.enter_context(hold(folder.lock))
    _check_shared(folder, world)
    with world.together():
        record = folder.check_run()
        check_config(record.config, config)
    if step is None and _is_finished(folder, world):
        log(f"{folder.path}: is finished; its model is in {folder.model}")
        return None
    checkpoint = _choose_checkpoint(folder, world, step, record.steps, log)
    if checkpoint is not None:
        with world.together():
            check_config(checkpoint.config, config)
    return Start(record, checkpoint)


def return_to(start: Start, layout: ProcessLayout, setup: Setup, folder: RunFolder, world: World, log: Log) -> None:
    """Remove what a run left after the checkpoint from which it resumes."""
    if start.checkpoint is not None and (changed := describe_changes(start.checkpoint, layout)):
        log(f"warning   the last digits may differ from those of an uninterrupted run: {changed}")
    done, events = _locate(start.checkpoint)
    with world.together():
        if world.rank == 0:  # in this order: a run that is killed here resumes from the same step
            _note_start(folder, done, setup)
            Checkpoints(folder.checkpoints).remove_after(done)
            folder.remove_later_exports(done, setup.record.steps)
            rewind_metrics(folder.metrics, events)


def _is_finished(folder: RunFolder, world: World) -> bool:
    """Whether there is nothing left to do. Every byte of the model of a finished run is checked."""
    finished = False
    with world.together():
        if world.rank == 0:
            finished = folder.finished and folder.has_export(folder.model)
    return world.from_first(finished)


def _choose_checkpoint(folder: RunFolder, world: World, step: int | None, last: int, log: Log) -> Manifest | None:
    """Choose the checkpoint from which a run of `last` steps resumes, and check that it can; None: it begins anew."""
    checkpoints = Checkpoints(folder.checkpoints)
    with world.together():
        if world.rank == 0:
            folder.sweep()
            checkpoints.sweep()
            if step != 0 and not checkpoints.steps() and (saved := folder.last_saved()) is not None:
                raise UserError(
                    f"{checkpoints.folder}: its checkpoints are gone, and there was one of step {saved}; mount the "
                    f"disk or put them back, or begin anew: torchtrain resume {folder.path} --step 0"
                )
    checkpoint = None if step == 0 else checkpoints.open(step, world)
    if checkpoint is None:
        log(f"begin     anew in {folder.path}" + ("" if step == 0 else ": it has no checkpoint"))
    else:
        log(f"resume    from step {checkpoint.progress.step:,} of {folder.path}")
    done, events = _locate(checkpoint)
    with world.together():
        if world.rank == 0:
            if not has_beginning(folder.metrics, events):
                whole = _last_whole_events(checkpoints, folder.metrics, done)
                raise UserError(
                    f"{folder.metrics}: has been changed: it does not begin with the {events.bytes:,} bytes that "
                    f"belong to step {done}; restore the file, or go back to where it is whole: torchtrain resume "
                    f"{folder.path} --step {whole}"
                )
            folder.check_later_exports(done, last)
    return checkpoint


def _last_whole_events(checkpoints: Checkpoints, metrics: Path, before: int) -> int:
    """Return the last step before this one whose checkpoint and beginning of `metrics.jsonl` are whole, or 0."""
    for step in reversed([step for step in checkpoints.steps() if step < before]):
        with suppress(UserError):
            checkpoints.verify(step)
            if has_beginning(metrics, Manifest.read(checkpoints.path(step)).progress.metrics):
                return step
    return 0


def _note_start(folder: RunFolder, step: int, setup: Setup) -> None:
    folder.note_start(step, setup.store.folder, setup.store.header.sha256, Path(setup.source.folder))


def _check_shared(folder: RunFolder, world: World) -> None:
    record = world.from_first(entry_of(folder.record) if world.rank == 0 else NOTHING)
    with world.together():
        folder.check_shared(record)


def _locate(checkpoint: Manifest | None) -> tuple[int, FileEntry]:
    """Return how many steps a checkpoint holds, and the beginning of `metrics.jsonl` that belongs to them."""
    return (0, NOTHING) if checkpoint is None else (checkpoint.progress.step, checkpoint.progress.metrics)
