"""How a run gets its folder: a new run makes it, a resumed run goes back to a checkpoint in it.

Both set the run up first, so nothing is made or removed for a run that does not fit.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from anchorline.errors import UserError
from anchorline.files import FileEntry, entry_of
from torchtrain.checkpoint.identity import check_config, check_identity, describe_changes
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config
from torchtrain.distributed.world import World
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import hold
from torchtrain.run.session import read_layout
from torchtrain.run.setup import Kept, Setup
from torchtrain.run.termination import Termination
from torchtrain.training.events import NOTHING, has_beginning, rewind_metrics


class Opening:
    """Opens the folder of a run: every rank calls it alike, rank 0 writes.

    Args:
        config: the run's.
        folder: the run's.
        world: this rank's place.
        termination: gets the advice how to resume the run.
        log: takes one line at a time.
    """

    def __init__(
        self, config: Config, folder: RunFolder, world: World, termination: Termination, log: Callable[[str], None]
    ) -> None:
        self.config, self.folder, self.world, self.termination, self.log = config, folder, world, termination, log
        self.checkpoints = Checkpoints(folder.checkpoints)
        self.leads = world.rank == 0

    def open_new(self, set_up: Callable[[], Setup], replace: bool, locks: ExitStack) -> Setup:
        """Set up a new run, and make its folder.

        Args:
            set_up: makes model and rows.
            replace: if the folder holds a run, rename it to FOLDER.replaced-N.
            locks: hold the folder for as long as they last.

        Raises:
            UserError, OtherRankFailed: the folder cannot be made, or what `set_up` raises; then there is none.
        """
        with self.world.together():
            if self.leads:
                self.folder.check(replace, self.config.model.source, self.config.data)
        setup = set_up()
        with self.world.together():
            if self.leads:
                replaced = locks.enter_context(self.folder.create(self.config, setup.record, replace))
                self._note_start(0, setup)
                if replaced is not None:
                    self.log(f"replaced  the old run is in {replaced}")
        self._check_shared()
        return setup

    def open_existing(
        self,
        set_up: Callable[[Callable[[dict[str, Any]], None], Kept], Setup],
        step: int | None,
        locks: ExitStack,
    ) -> tuple[Setup, Manifest | None] | None:
        """Set up a run that resumes, and remove what it left after the checkpoint from which it resumes.

        Args:
            set_up: makes model and rows; takes the check of what they are made of, and what stays as it was.
            step: of the checkpoint; 0 begins anew; None is the last.
            locks: hold the folder for as long as they last.

        Returns:
            The setup, and the checkpoint (None: the run begins anew); None if the run is finished.

        Raises:
            UserError, OtherRankFailed: there is no run, it is made of something else, a checkpoint is damaged, or what
                `set_up` raises.
        """
        with self.world.together():
            if self.leads:
                self.folder.check_run()
                locks.enter_context(hold(self.folder.lock))
        self._check_shared()
        with self.world.together():
            record = self.folder.check_run()
            check_config(record["config"], self.config)
        if step is None and self._is_finished():
            self.log(f"{self.folder.path}: is finished; its model is in {self.folder.model}")
            return None
        steps = record.get("steps", self.config.train.steps)
        checkpoint = self._choose_checkpoint(step, steps)
        check = partial(check_identity, record["identity"] if checkpoint is None else checkpoint.identity)
        setup = set_up(check, Kept(record.get("engine") if self.config.model.attention == "auto" else None, steps))
        self._return_to(checkpoint, setup)
        return setup, checkpoint

    def _is_finished(self) -> bool:
        """Whether there is nothing left to do. Every byte of the model of a finished run is checked."""
        finished = False
        with self.world.together():
            if self.leads:
                finished = self.folder.finished and self.folder.has_export(self.folder.model)
        return self.world.from_first(finished)

    def _choose_checkpoint(self, step: int | None, last: int) -> Manifest | None:
        """Choose the checkpoint from which a run of `last` steps resumes, and check that it can; None: it begins
        anew.
        """
        with self.world.together():
            if self.leads:
                self.folder.sweep()
                self.checkpoints.sweep()
                if step != 0 and not self.checkpoints.steps() and (saved := self.folder.last_saved()) is not None:
                    raise UserError(
                        f"{self.checkpoints.folder}: its checkpoints are gone, and there was one of step {saved}; "
                        f"mount the disk or put them back, or begin anew: torchtrain resume {self.folder.path} --step 0"
                    )
        checkpoint = None if step == 0 else self.checkpoints.open(step, self.world)
        if checkpoint is None:
            self.log(f"begin     anew in {self.folder.path}" + ("" if step == 0 else ": it has no checkpoint"))
        else:
            self.log(f"resume    from step {checkpoint.progress.step:,} of {self.folder.path}")
        done, events = _locate(checkpoint)
        with self.world.together():
            if checkpoint is not None:
                check_config(checkpoint.config, self.config)
            if self.leads:
                if not has_beginning(self.folder.metrics, events):
                    raise UserError(
                        f"{self.folder.metrics}: has been changed: it does not begin with the {events.bytes:,} bytes "
                        f"that belong to step {done}; restore the file, or go back to where it is whole: torchtrain "
                        f"resume {self.folder.path} --step {self._last_whole_events(done)}"
                    )
                self.folder.check_later_exports(done, last)
        return checkpoint

    def _last_whole_events(self, before: int) -> int:
        """Return the last step before this one whose checkpoint and beginning of `metrics.jsonl` are whole, or 0."""
        for step in reversed([step for step in self.checkpoints.steps() if step < before]):
            with suppress(UserError):
                self.checkpoints.verify(step)
                manifest = Manifest.read(self.checkpoints.path(step))
                if has_beginning(self.folder.metrics, manifest.progress.metrics):
                    return step
        return 0

    def _return_to(self, checkpoint: Manifest | None, setup: Setup) -> None:
        """Remove what the run left after the checkpoint."""
        layout = read_layout(self.config, setup, self.world)
        if checkpoint is not None and (changed := describe_changes(checkpoint, layout)):
            self.log(f"warning   the last digits may differ from those of an uninterrupted run: {changed}")
        done, events = _locate(checkpoint)
        with self.world.together():
            if self.leads:  # in this order: a run that is killed here resumes from the same step
                self._note_start(done, setup)
                self.checkpoints.remove_after(done)
                self.folder.remove_later_exports(done, setup.steps)
                rewind_metrics(self.folder.metrics, events)

    def _note_start(self, step: int, setup: Setup) -> None:
        self.folder.note_start(step, setup.store.folder, setup.store.header.sha256, Path(setup.weights))

    def _check_shared(self) -> None:
        """Check that all ranks see the run that rank 0 sees."""
        record = self.world.from_first(entry_of(self.folder.record) if self.leads else NOTHING)
        with self.world.together():
            self.folder.check_shared(record)
        self.termination.advice = f"to resume from the last checkpoint: torchtrain resume {self.folder.path}"


def _locate(checkpoint: Manifest | None) -> tuple[int, FileEntry]:
    """Return how many steps a checkpoint holds, and the beginning of `metrics.jsonl` that belongs to them."""
    return (0, NOTHING) if checkpoint is None else (checkpoint.progress.step, checkpoint.progress.metrics)
