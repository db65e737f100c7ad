"""How a run gets its folder: a new run makes it, a resumed run goes back to a checkpoint in it.

Both set the run up first, so nothing is made or removed for a run that does not fit.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from anchorline.errors import UserError
from anchorline.files import FileEntry, entry_of, expand
from torchtrain.checkpoint.identity import check_config, check_identity, describe_changes
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config
from torchtrain.data.corpus import source_files
from torchtrain.data.remote import is_url
from torchtrain.distributed.world import World
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import hold
from torchtrain.run.session import layout_of
from torchtrain.run.setup import Setup
from torchtrain.run.termination import Termination
from torchtrain.training.events import NOTHING, check_beginning, rewind_metrics


def local_sources(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield each file or folder, with the field that names it."""
    yield from _with_links("model.source", expand(config.model.source))
    if config.data.prepared is not None:
        yield from _with_links("data.prepared", expand(config.data.prepared))
    for number, source in enumerate(config.data.sources):
        pattern, name = (source.files, "files") if source.files is not None else (source.texts, "texts")
        if pattern is not None and not is_url(pattern):
            yield from ((f"data.sources.{number}.{name}", Path(file.place)) for file in source_files(source))
        elif source.dataset is not None:
            yield from _with_links(f"data.sources.{number}.dataset", expand(source.dataset))


def _with_links(field: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a folder and what links lead out of it: a hub's cache holds nothing else."""
    yield field, folder
    for place, folders, names in os.walk(folder):
        yield from ((field, path) for name in (*folders, *names) if (path := Path(place, name)).is_symlink())


class Opening:
    """Opens the folder of a run: every rank calls it alike, rank 0 writes.

    Args:
        config: the run's.
        folder: the run's.
        world: this rank's place.
        termination: is told how the run goes on.
        log: takes one line at a time on what is chosen.
    """

    def __init__(
        self, config: Config, folder: RunFolder, world: World, termination: Termination, log: Callable[[str], None]
    ) -> None:
        self.config, self.folder, self.world, self.termination, self.log = config, folder, world, termination, log
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.leads = world.rank == 0

    def open_new(self, set_up: Callable[[], Setup], replace: bool, delete_replaced: bool, locks: ExitStack) -> Setup:
        """Set up a run that begins, and make its folder.

        Args:
            set_up: makes model and rows.
            replace: if the folder holds a run, rename it to FOLDER.replaced-N.
            delete_replaced: remove that folder once the new one is made.
            locks: hold the folder for as long as they last.

        Raises:
            UserError, OtherRankFailed: the folder cannot be made, or what `set_up` raises; then there is none.
        """
        with self.world.together():
            if self.leads:
                self.folder.check(replace, self.config.data.cache, local_sources(self.config))
        setup = set_up()
        with self.world.together():
            if self.leads:
                sources = local_sources(self.config)
                replaced = locks.enter_context(self.folder.create(self.config, setup.record, replace, sources))
                self._note_start(0, setup)
                if replaced is not None and delete_replaced:
                    shutil.rmtree(replaced, ignore_errors=True)
                if replaced is not None and os.path.lexists(replaced):
                    self.log(f"replaced  the old run is in {replaced}")
        self._check_shared()
        return setup

    def open_existing(
        self, set_up: Callable[[Callable[[dict[str, Any]], None]], Setup], step: int | None, locks: ExitStack
    ) -> tuple[Setup, Manifest | None] | None:
        """Set up a run that goes on, and remove what it left after the checkpoint that it goes on from.

        Args:
            set_up: makes model and rows; takes the check of what they are made of.
            step: of the checkpoint; 0 begins anew; None is the last.
            locks: hold the folder for as long as they last.

        Returns:
            The setup, and the checkpoint (None: the run begins anew); None if the run is finished.

        Raises:
            UserError, OtherRankFailed: there is no run, it is made of something else, a checkpoint is damaged, or what
                `set_up` raises.
        """
        self._hold(locks)
        identity = self._read_identity()
        if step is None and self._is_finished():
            self.log(f"{self.folder.path}: is finished; its model is in {self.folder.model}")
            return None
        checkpoint = self._choose_checkpoint(step)
        setup = set_up(partial(check_identity, identity if checkpoint is None else checkpoint.identity))
        self._return_to(checkpoint, setup)
        return setup, checkpoint

    def _hold(self, locks: ExitStack) -> None:
        """Hold the folder for as long as `locks` last."""
        with self.world.together():
            if self.leads:
                self.folder.check_run()
                locks.enter_context(hold(self.folder.record))
        self._check_shared()

    def _read_identity(self) -> dict[str, Any]:
        """Return what the run was made of when it was begun; check that its config is the one that goes on."""
        with self.world.together():
            record = self.folder.check_run()
            check_config(record["config"], self.config)
        return record["identity"]

    def _is_finished(self) -> bool:
        """Whether there is nothing left to do; the model of a finished run is checked."""
        finished = False
        with self.world.together():
            if self.leads and self.folder.finished:
                self.folder.check_model()
                finished = True
        return self.world.from_first(finished)

    def _choose_checkpoint(self, step: int | None) -> Manifest | None:
        """Choose the checkpoint that the run goes on from, and check that it can; None: it begins anew."""
        with self.world.together():
            if self.leads:
                self.folder.sweep()
                if step != 0:
                    self.checkpoints.sweep()
                    self._check_not_gone()
        checkpoint = None if step == 0 else self.checkpoints.open(step, self.world)
        if checkpoint is None:
            self.log(f"begin     anew in {self.folder.path}" + ("" if step == 0 else ": it has no checkpoint"))
        else:
            self.log(f"go on     from step {checkpoint.progress.step:,} of {self.folder.path}")
        done, events = _locate(checkpoint)
        with self.world.together():
            if checkpoint is not None:
                check_config(checkpoint.config, self.config)
            if self.leads:
                check_beginning(self.folder.metrics, events)
                self.folder.check_later_exports(done, self.config.train.steps)
        return checkpoint

    def _return_to(self, checkpoint: Manifest | None, setup: Setup) -> None:
        """Remove what the run left after the checkpoint."""
        if checkpoint is not None and (
            changed := describe_changes(checkpoint, layout_of(self.config, setup, self.world))
        ):
            self.log(f"warning   the last digits may differ from those of an uninterrupted run: {changed}")
        done, events = _locate(checkpoint)
        with self.world.together():
            if self.leads:  # in this order: killed in between, it is taken up at the same step
                self.folder.reopen()
                self._note_start(done, setup)
                if checkpoint is None:
                    self.checkpoints.give_up()
                    self.checkpoints.sweep()
                self.checkpoints.forget_after(done)
                self.folder.remove_later_exports(done, self.config.train.steps)
                rewind_metrics(self.folder.metrics, events)

    def _note_start(self, step: int, setup: Setup) -> None:
        self.folder.note_start(step, setup.store.folder, setup.store.header.sha256, setup.frozen)

    def _check_shared(self) -> None:
        """Check that all ranks see the run that rank 0 made or found."""
        record = self.world.from_first(entry_of(self.folder.record) if self.leads else NOTHING)
        with self.world.together():
            self.folder.check_shared(record)
        self.termination.advice = f"to go on from the last checkpoint: torchtrain resume {self.folder.path}"

    def _check_not_gone(self) -> None:
        """Check that there are checkpoints where there were some: their disk may not be mounted."""
        if self.checkpoints.steps():
            return
        anew = f"or begin anew: torchtrain resume {self.folder.path} --step 0"
        try:
            saved = self.folder.last_saved()
        except UserError as error:
            raise UserError(
                f"{error}; whether there were checkpoints cannot be told: mend it, remove it, {anew}"
            ) from None
        if saved is not None:
            raise UserError(
                f"{self.checkpoints.folder}: its checkpoints are gone, and there was one of step {saved}; mount their "
                f"disk or put them back, {anew}"
            )


def _locate(checkpoint: Manifest | None) -> tuple[int, FileEntry]:
    """Return how many steps a checkpoint holds, and the beginning of `metrics.jsonl` that belongs to them."""
    return (0, NOTHING) if checkpoint is None else (checkpoint.progress.step, checkpoint.progress.metrics)
