"""The recipe: config -> model and rows -> held-out loss -> steps -> held-out loss -> export -> report.

`train` and `resume` say what is done, one thing after another; both lead to `_Run.train`. It is the same on one process
and on many: every rank runs it, rank 0 writes and speaks, and what any rank finds wrong under `World.together` stops
all of them.
"""

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from anchorline.errors import UserError
from anchorline.files import FileEntry, entry_of, replace_file, resolve
from torchtrain.checkpoint.identity import check_config, check_identity, describe_changes
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config
from torchtrain.distributed.layout import check_layout
from torchtrain.distributed.world import World, join
from torchtrain.errors import Terminated
from torchtrain.planning.flops import FlopCounter
from torchtrain.run.finite import check_finite
from torchtrain.run.folder import RunFolder
from torchtrain.run.journal import Journal
from torchtrain.run.lock import hold
from torchtrain.run.report import plot, tell_tokenising
from torchtrain.run.session import Session, layout_of
from torchtrain.run.setup import Setup, set_up
from torchtrain.run.sources import local_sources
from torchtrain.run.steps import take_steps
from torchtrain.run.termination import Termination
from torchtrain.run.writers import check_writers
from torchtrain.training.determinism import deterministic
from torchtrain.training.events import NOTHING, MetricsFile, check_beginning, read_metrics, rewind
from torchtrain.training.held_out import HeldOut, measure_held_out
from torchtrain.training.strategy import make_strategy


@dataclass(frozen=True)
class Result:
    """What a run gave: held-out losses, tokens trained on, tokens a second, and the exported model's folder."""

    before: HeldOut
    after: HeldOut
    tokens_seen: int
    tokens_per_second: float
    model: Path


def train(
    config: Config, *, replace: bool = False, console: Console | None = None, started: float | None = None
) -> Result | None:
    """Train as the config says; leave the model, `metrics.jsonl`, `loss.png` and the config in the run's folder.

    Every process that torchrun started calls this.

    Args:
        config: what `load_config` returned.
        replace: remove the run that the folder holds.
        console: where people look; default: standard error.
        started: when the process began, by `time.perf_counter`; default: now.

    Returns:
        What the run gave, on rank 0; None on the others.

    Raises:
        UserError: something does not fit, and then no run folder was made; or a step is bad
            (`torchtrain.training.guard`), or a checkpoint cannot be written.
        OtherRankFailed: another rank found what does not fit, and says so.
        Terminated: SIGTERM was obeyed, and what there was is saved.
    """
    started = time.perf_counter() if started is None else started
    with Termination() as termination, _place(config) as world, ExitStack() as held:
        run = _Run(config, console, world, termination, started)
        run.check()
        run.check_place(replace)
        setup = run.set_up()
        run.make_folder(setup, replace, held)
        return run.train(setup)


def resume(
    config: Config, *, step: int | None = None, console: Console | None = None, started: float | None = None
) -> Result | None:
    """Go on with the run that `run.folder` holds, as if it had never been interrupted.

    Every process that torchrun started calls this. As many processes as before, spread alike, leave bitwise what the
    uninterrupted run would have; otherwise rows, their order and the restored weights are the same.

    Args:
        config: the run's own, but for what `torchtrain.checkpoint.identity.FREE` names.
        step: from the checkpoint of which step; 0 begins anew; default: the last.
        console: where people look; default: standard error.
        started: when the process began, by `time.perf_counter`; default: now.

    Returns:
        As `train`; None, too, if the run is finished.

    Raises:
        UserError: there is no run; what decides the numbers has changed; a checkpoint is damaged; or as `train`.
        OtherRankFailed, Terminated: as `train`.
    """
    started = time.perf_counter() if started is None else started
    with Termination() as termination, _place(config) as world, ExitStack() as held:
        run = _Run(config, console, world, termination, started)
        run.check()
        run.hold_folder(held)
        identity = run.read_identity()
        if step is None and run.is_finished():
            run.say(f"{run.folder.path}: is finished; its model is in {run.folder.model}")
            return None
        checkpoint = run.open_checkpoint(step)
        setup = run.set_up(partial(check_identity, identity if checkpoint is None else checkpoint.identity))
        run.rewind(checkpoint, setup)
        return run.train(setup, checkpoint)


@contextmanager
def _place(config: Config) -> Iterator[World]:
    """Join the other processes, and compute as the config asks, for as long as the block lasts."""
    with deterministic(config.train.deterministic), join(config) as world:
        yield world


class _Run:
    """A run of this process and those it works with; the methods stand in the order in which they are called."""

    def __init__(
        self, config: Config, console: Console | None, world: World, termination: Termination, started: float
    ) -> None:
        self.config, self.world, self.termination, self.started = config, world, termination, started
        self.leads = world.rank == 0
        self.console = (console or Console(stderr=True)) if self.leads else Console(quiet=True)
        self.say = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)
        with world.together():
            self.folder = RunFolder(config.run.folder)
        self.checkpoints = Checkpoints(self.folder.checkpoints)

    def check(self) -> None:
        """Check what needs neither model nor data."""
        with self.world.together():
            resolve("data.cache", self.config.data.cache)
            check_layout(self.config, self.world.size)
            check_writers(self.config)

    # --- the folder of a run that begins ------------------------------------------------------------------------------

    def check_place(self, replace: bool) -> None:
        """Check that the folder can be made."""
        with self.world.together():
            if self.leads:
                self.folder.check(replace, self.config.data.cache, local_sources(self.config))

    def make_folder(self, setup: Setup, replace: bool, held: ExitStack) -> None:
        """Make the folder, and hold it for as long as `held` lasts."""
        with self.world.together():
            if self.leads:
                sources = local_sources(self.config)
                held.enter_context(self.folder.create(self.config, setup.record, replace, sources))
        self._see_folder()

    # --- the folder of a run that goes on -----------------------------------------------------------------------------

    def hold_folder(self, held: ExitStack) -> None:
        """Hold the folder for as long as `held` lasts."""
        with self.world.together():
            if self.leads:
                self.folder.check_run()
                held.enter_context(hold(self.folder.record))
        self._see_folder()

    def read_identity(self) -> dict[str, Any]:
        """Return what the run was made of when it was begun; check that its config is the one that goes on."""
        with self.world.together():
            record = self.folder.check_run()
            check_config(record["config"], self.config)
        return record["identity"]

    def is_finished(self) -> bool:
        """Whether there is nothing left to do; the model of a finished run is checked."""
        finished = False
        with self.world.together():
            if self.leads and self.folder.finished:
                self.folder.check_model()
                finished = True
        return self.world.from_first(finished)

    def open_checkpoint(self, step: int | None) -> Manifest | None:
        """Choose the checkpoint that the run goes on from, and check that it can; None: it begins anew."""
        with self.world.together():
            if self.leads:
                self.folder.sweep()
                if step != 0:
                    self.checkpoints.sweep()
                    self._check_not_gone()
        checkpoint = None if step == 0 else self.checkpoints.open(step, self.world)
        if checkpoint is None:
            self.say(f"begin     anew in {self.folder.path}" + ("" if step == 0 else ": it has no checkpoint"))
        else:
            self.say(f"go on     from step {checkpoint.progress.step:,} of {self.folder.path}")
        done, events = _locate(checkpoint)
        with self.world.together():
            if checkpoint is not None:
                check_config(checkpoint.config, self.config)
            if self.leads:
                check_beginning(self.folder.metrics, events)
                self.folder.check_forgetting(done, self.config.train.steps)
        return checkpoint

    def rewind(self, checkpoint: Manifest | None, setup: Setup) -> None:
        """Remove what the run left after the checkpoint."""
        if checkpoint is not None and (
            changed := describe_changes(checkpoint, layout_of(self.config, setup, self.world))
        ):
            self.say(f"warning   the last digits may differ from those of an uninterrupted run: {changed}")
        done, events = _locate(checkpoint)
        with self.world.together():
            if self.leads:  # in this order: killed in between, it is taken up at the same step
                self.folder.reopen()
                if checkpoint is None:
                    with MetricsFile(self.folder.timing) as timing:
                        timing.write("begin", {"step": 0})
                    self.checkpoints.give_up()
                    self.checkpoints.sweep()
                self.checkpoints.forget_after(done)
                self.folder.forget_after(done, self.config.train.steps)
                rewind(self.folder.metrics, events)

    def _see_folder(self) -> None:
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

    # --- both ---------------------------------------------------------------------------------------------------------

    def set_up(self, check: Callable[[dict[str, Any]], None] = lambda identity: None) -> Setup:
        """Make model and rows; see `torchtrain.run.setup.set_up`."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.config.run.seed)
        with self.world.together(), self.console.status("preparing") as spinner:
            return set_up(self.config, self.say, tell_tokenising(self.console, spinner, self.say), self.world, check)

    def train(self, setup: Setup, checkpoint: Manifest | None = None) -> Result | None:
        """Measure the held-out loss, take the steps, measure it again, export.

        Args:
            setup: model and rows.
            checkpoint: where the run goes on from.

        Returns:
            As the function `train`.
        """
        config, folder = self.config, self.folder
        counter = FlopCounter.of(setup.model)  # before a strategy cuts the weights up
        strategy = make_strategy(setup.model, setup.engine, config, self.world)
        with Journal(config, folder, self.world, self.console) as journal:
            session = Session(config, folder, setup, strategy, journal.metrics, journal.timing, self.say)
            if checkpoint is not None:
                session.take_up(checkpoint)
            journal.open_writers(session.step)
            before = session.before = session.before or self._measure_held_out(session, journal)
            tokens_before, seconds = session.tokens_seen, 0.0
            journal.begin_steps(session.step, self.started, resumed=checkpoint is not None)
            with self.termination.defer():
                session.export_if_kept()  # of the step that was saved last, if the run was interrupted right then
                for step in take_steps(
                    config.train, setup, strategy, counter, session.guard, session.step, session.tokens_seen
                ):
                    session.note(step.number, step.tokens_seen)
                    journal.write_step(step)
                    seconds += step.seconds
                    if session.due:
                        session.save()
                        session.export_if_kept()
                    self._stop_if_asked(session)
                after = self._measure_held_out(session, journal, lambda: self._stop_if_asked(session))
                if session.saved:  # else all would be lost: the run comes to its end
                    self.termination.obey()
                self.say(f"exporting to {folder.model}")
                session.export(folder.model)  # which refuses weights that are not finite
            self._finish(session.step)
        tokens = session.tokens_seen - tokens_before
        speed = tokens / seconds if seconds else 0.0
        return Result(before, after, session.tokens_seen, speed, folder.model) if self.leads else None

    def _measure_held_out(
        self, session: Session, journal: Journal, after_row: Callable[[], None] = lambda: None
    ) -> HeldOut:
        """Measure the held-out loss of the model as it is now, write it down and tell it.

        Args:
            session: where the run stands.
            journal: takes the losses.
            after_row: called after each micro-batch of rows.

        Raises:
            UserError, OtherRankFailed: weights or losses are not finite.
        """
        setup, strategy, train = session.setup, session.strategy, self.config.train
        losses = HeldOut(setup.store.domains, setup.own_positions)
        micro_batch = 1 if self.world.size == 1 else train.micro_batch
        rows_at_a_time = micro_batch * self.world.data_parallel
        advance = journal.display.task("held out", -(-len(setup.held_out) // rows_at_a_time))

        def on_row(status: str) -> None:
            advance(status)
            after_row()

        measure_held_out(setup.model, setup.held_out, losses, train.loss_chunk, on_row, strategy, micro_batch)
        event = {"step": session.step, "tokens_seen": session.tokens_seen, **losses.as_dict()}
        journal.metrics.write("evaluation", event)
        with self.world.together():
            check_finite(strategy, f"after step {session.step}", "lower train.learning_rate and train anew")
            _check_held_out(losses, session.step)
        journal.tell("evaluation", session.step, event)
        return losses

    def _stop_if_asked(self, session: Session) -> None:
        """Save and stop if any rank was sent SIGTERM.

        Raises:
            Terminated: on all ranks.
        """
        (asked,) = self.world.sum([float(self.termination.asked)])
        if asked:
            session.save()
            saved = f"stopped by SIGTERM after step {session.step}, which is saved"
            advice = f"to go on: torchtrain resume {self.folder.path}"
            raise Terminated(f"{saved}; {advice}" if self.leads else "", agreed=True)

    def _finish(self, step: int) -> None:
        """Draw the losses, and write down that the run has left everything."""
        with self.world.together():
            if self.leads:
                replace_file(self.folder.plot, plot(read_metrics(self.folder.metrics)))
                self.folder.finish(step)


def _locate(checkpoint: Manifest | None) -> tuple[int, FileEntry]:
    """Return how many steps a checkpoint holds, and the beginning of `metrics.jsonl` that belongs to them."""
    return (0, NOTHING) if checkpoint is None else (checkpoint.progress.step, checkpoint.progress.metrics)


def _check_held_out(losses: HeldOut, step: int) -> None:
    """Check that a held-out loss is a number; all ranks have the same.

    Raises:
        UserError: it is none.
    """
    loss = losses.overall.value
    if loss is not None and not math.isfinite(loss):
        raise UserError(
            f"the held-out loss after step {step} is {loss}: activations are not finite, though the weights are; "
            "set model.dtype: float32" + (", lower train.learning_rate" if step else "") + ", and train anew"
        )
