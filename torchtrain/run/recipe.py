"""The recipe: config -> model and rows -> held-out loss -> steps -> held-out loss -> export -> report.

`Trainer.begin` and `Trainer.resume` take the folder, set the run up and call `Trainer.train`. Every rank runs all of
it, rank 0 writes and prints, and a mistake that any rank finds under `World.together` stops all of them.
"""

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from anchorline.errors import UserError
from anchorline.files import resolve
from anchorline.terminal import Console
from torchtrain.attention import make_plan
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.checkpoint.state import fill_masters, state_of
from torchtrain.config import Config
from torchtrain.distributed.layout import check_layout
from torchtrain.distributed.signals import SIGNALS
from torchtrain.distributed.world import World, join
from torchtrain.errors import Terminated
from torchtrain.marks import IGNORED, PADDING
from torchtrain.modeling.compilation import is_compiled
from torchtrain.products import measure_speed
from torchtrain.run.folder import RunFolder
from torchtrain.run.report import Journal, make_progress_printer
from torchtrain.run.session import Session, read_layout
from torchtrain.run.setup import Setup, Start, set_up
from torchtrain.run.start import find_start, make_folder, return_to
from torchtrain.run.steps import check_finite, take_steps
from torchtrain.run.termination import Termination
from torchtrain.training.determinism import deterministic
from torchtrain.training.flops import FlopCounter
from torchtrain.training.held_out import HeldOut, measure_held_out
from torchtrain.training.strategy import make_strategy

_COMPILING = 60  # seconds that torch.compile takes in the first step
_SHARE = 0.6  # of a matrix product's speed that training reached: 0.5 on a CPU with fast bfloat16, 0.9 on one without

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchtrain.evaluation.on_the_way import TrainingEvaluation

# Seconds of a step above which a signal does not wait for its end: torchrun kills 30 s after it handed a signal on, in
# which the save must end, too.
_LONG = 10.0


@dataclass(frozen=True)
class Result:
    """The result of a run: held-out losses, tokens trained on, tokens a second, and the exported model's folder."""

    before: HeldOut
    after: HeldOut
    tokens_seen: int
    tokens_per_second: float
    model: Path


def train(
    config: Config,
    *,
    replace: bool = False,
    resume: bool = False,
    console: Console | None = None,
    started: float | None = None,
    on_model: Callable[["PreTrainedModel"], None] = lambda model: None,
) -> Result | None:
    """Train as the config says; leave the model, `metrics.jsonl`, `loss.png` and the config in the run's folder.

    Every process that torchrun started calls this. Return the result on rank 0; None on the others, and if a run that
    is resumed is finished.

    replace: if the folder holds a run, rename it to FOLDER.replaced-N.
    resume: if the folder holds a run, do what the function `resume` does.
    console: where people look; default: standard error.
    started: when the process began, by `time.perf_counter`; default: now.
    on_model: called with the loaded model, for experiments; a run that resumes is not told of it.
    Raises UserError: something does not fit, and then no run folder was made; or a step is bad
        (`torchtrain.training.guard`), or a checkpoint cannot be written.
    Raises OtherRankFailed: another rank has an error, and prints it.
    Raises Terminated: SIGTERM or Ctrl-C was obeyed, and the last step is saved.
    """
    with _open(config, console, started) as trainer:
        if resume and trainer.world.from_first(trainer.folder.is_run()):
            return trainer.resume(None)
        if resume:
            trainer.log(f"begin     a new run in {trainer.folder.path}")
        trainer.on_model = on_model
        return trainer.begin(replace)


def resume(
    config: Config, *, step: int | None = None, console: Console | None = None, started: float | None = None
) -> Result | None:
    """Resume the run in `run.folder`; it ends as if it had not been interrupted. Return as `train`.

    Every process that torchrun started calls this. With as many processes as before, and the same layout, it ends with
    the same bits. Otherwise rows, their order and the restored weights are the same.

    config: the run's own; only what `torchtrain.checkpoint.identity.FREE` names may have changed.
    step: from the checkpoint of which step; 0 starts again; default: the last.
    console, started: as `train`.
    Raises UserError: there is no run; a setting that decides the numbers has changed; a checkpoint is damaged; or as
        `train`.
    Raises OtherRankFailed, Terminated: as `train`.
    """
    with _open(config, console, started) as trainer:
        return trainer.resume(step)


@contextmanager
def _open(config: Config, console: Console | None, started: float | None) -> Iterator["Trainer"]:
    """Take signals, join the other processes, and compute as `train.deterministic` says, until the block ends."""
    started = time.perf_counter() if started is None else started
    with (
        Termination() as termination,
        deterministic(config.train.deterministic),
        join(config.distributed, for_threads=config.save.asynchronous) as world,
        ExitStack() as locks,
    ):
        yield Trainer(config, console, world, termination, started, locks)


class Trainer:
    """A run, on this process and those it works with. The methods are in the order in which they are called."""

    def __init__(
        self,
        config: Config,
        console: Console | None,
        world: World,
        termination: Termination,
        started: float,
        locks: ExitStack,
    ) -> None:
        self.config, self.world, self.termination, self.started = config, world, termination, started
        self.locks = locks  # on the run's folder
        self.leads = world.rank == 0
        self.console = (console or Console(stderr=True)) if self.leads else Console(quiet=True)
        self.log = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)
        with world.together():
            self.folder = RunFolder(config.run.folder)
        self._advice = f"to resume from the last checkpoint: torchtrain resume {self.folder.path}"
        self.on_model: Callable[[PreTrainedModel], None] = lambda model: None
        self.evaluation: TrainingEvaluation | None = None
        self.session: Session | None = None
        self.step_seconds = math.inf  # of the last step, the same on all ranks
        termination.answer, termination.leave = self._answer, partial(self.console.show_cursor, True)

    def begin(self, replace: bool) -> Result | None:
        """Train in a new folder; see the function `train`."""
        self.check(new=True)
        with self.world.together():
            if self.leads:
                self.folder.check(replace, self.config.model.source, self.config.data)
        setup = self.set_up(Start())
        make_folder(self.config, setup, self.folder, self.world, replace, self.locks, self.log)
        self.termination.advice = self._advice
        return self.train(setup)

    def resume(self, step: int | None) -> Result | None:
        """Resume the run in the folder; see the function `resume`."""
        self.termination.advice = self._advice
        self.check(new=False)
        start = find_start(self.config, self.folder, self.world, step, self.locks, self.log)
        if start is None:
            return None
        setup = self.set_up(start)
        layout = read_layout(self.config.distributed, self.config.train, setup, self.world)
        return_to(start, layout, setup, self.folder, self.world, self.log)
        return self.train(setup, start.checkpoint)

    def check(self, new: bool) -> None:
        """Check what needs neither model nor data; of a new run also that nothing has been evaluated yet."""
        with self.world.together():
            resolve("data.cache", self.config.data.cache)
            check_layout(self.config.distributed, self.config.train, self.world.size)
            self.config.log.check_installed()
            self.evaluation = make_evaluation(self.config, self.world)
            if new and self.evaluation is not None:
                self.evaluation.check_new()

    def set_up(self, start: Start) -> Setup:
        """Make model and rows; see `torchtrain.run.setup.set_up`."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.config.run.seed)
        with self.world.together(), self.console.status("preparing") as spinner:
            report_progress = make_progress_printer(self.console, spinner, self.log)
            setup = set_up(self.config, self.log, report_progress, self.world, start)
            self.on_model(setup.model)
            if self.evaluation is not None:  # before a folder is made, or an old run is renamed
                self.evaluation.check_fits(setup.model, setup.source.tokenizer, self.log)
            if self.config.model.lora is not None and self.config.model.lora.dropout:
                self._draw_apart()
            return setup

    def _draw_apart(self) -> None:
        """Seed each rank differently: with one seed all would drop the same elements of different tokens."""
        own = np.random.SeedSequence(self.config.run.seed, spawn_key=(self.world.rank,))
        torch.manual_seed(int(own.generate_state(1, np.uint64)[0]))

    def train(self, setup: Setup, checkpoint: Manifest | None = None) -> Result | None:
        """Measure the held-out loss, take the steps, measure it again, export; return as the function `train`."""
        self.config = self.config.model_copy(update={"train": self.config.train.with_steps(setup.record.steps)})
        config, folder = self.config, self.folder
        counter = FlopCounter.of(setup.model)
        strategy = make_strategy(setup.model, setup.loaded.engine, config.distributed, config.train, self.world)
        with Journal(config.log, folder, self.world, self.console) as journal:
            session = Session(config, folder, setup, strategy, journal.metrics, journal.timing, self.log)
            self.session = session
            if checkpoint is not None:
                session.resume(checkpoint)
            elif masters := fill_masters(state_of(strategy), setup.source.folder):
                self.log(f"masters   {masters}")
            journal.open_writers(session.step, config.model_dump(mode="json"))
            before = session.before = session.before or self._measure_held_out(session, journal, counter=counter)
            tokens_before, seconds = session.tokens_seen, 0.0
            journal.begin_steps(session.step, config.train.steps, self.started, resumed=checkpoint is not None)
            with self._finish_save_on_error(session):
                with self.termination.defer():
                    session.export_if_kept()  # the run may have been killed between the last save and its export
                    if self._held_out_due(session) and not journal.has_held_out(session.step):
                        self._measure_held_out(session, journal, lambda: self._check_stop(session))
                    self._evaluate(session)
                    for step in take_steps(
                        config.train,
                        setup,
                        strategy,
                        counter,
                        session.guard,
                        session.step,
                        session.tokens_seen,
                        journal.display.note_part,
                        self._stops_within,
                    ):
                        self.step_seconds = step.seconds
                        session.step, session.tokens_seen = step.number, step.tokens_seen
                        journal.write_step(step)
                        seconds += step.seconds
                        if session.saves_now:
                            session.save()
                        session.export_if_kept()
                        self._check_stop(session)
                        if self._held_out_due(session):
                            self._measure_held_out(session, journal, lambda: self._check_stop(session))
                        self._evaluate(session)
                    self._check_stop(session)
                    after = self._measure_held_out(session, journal, lambda: self._check_stop(session))
                    session.finish_saves()
                    self._check_stop(session)
                    if (
                        session.saved == session.step
                    ):  # otherwise the run continues to its end, because all would be lost
                        self.termination.obey()
                    self.log(f"exporting to {folder.model}")
                    session.export(folder.model)
                journal.finish(session.step)
        tokens = session.tokens_seen - tokens_before
        speed = tokens / seconds if seconds else 0.0
        return Result(before, after, session.tokens_seen, speed, folder.model) if self.leads else None

    def _held_out_due(self, session: Session) -> bool:
        """Whether the held-out loss is measured after this step, which is neither the first nor the last."""
        every = self.config.held_out.every
        return every > 0 and 0 < session.step < self.config.train.steps and session.step % every == 0

    def _measure_held_out(
        self,
        session: Session,
        journal: Journal,
        after_row: Callable[[], None] = lambda: None,
        counter: FlopCounter | None = None,
    ) -> HeldOut:
        """Measure and log the held-out loss now; empty without such rows. counter: log estimates of the time, too."""
        setup, strategy, train = session.setup, session.strategy, self.config.train
        losses = HeldOut(setup.store.domains, setup.source.own_positions)
        if not setup.held_out:
            return losses
        # Ulysses attention is built for forwards of `train.micro_batch` rows. One process goes row by row, so that its
        # losses have the same bits whatever the micro-batch is.
        micro_batch = 1 if self.world.size == 1 else train.micro_batch
        rows_at_a_time = micro_batch * self.world.data_parallel
        advance = journal.display.task("held out", -(-len(setup.held_out) // rows_at_a_time))
        held_out = sum(counter.flops(*_sizes(row)) for row in setup.held_out) / 3 if counter else 0  # forward alone
        if counter is not None and self.world.device.type == "cpu":
            speed = self.world.size * _SHARE * measure_speed(setup.model.dtype)
            self._log_estimate(setup, counter, held_out, held_out / speed, "of a matrix product, roughly", passes=2)

        ended = [time.perf_counter()]

        def on_row(status: str) -> None:
            ended.append(time.perf_counter())
            advance(status)
            after_row()

        measure_held_out(setup.model, setup.held_out, losses, train.loss_chunk, on_row, strategy, micro_batch)
        event = {"step": session.step, "tokens_seen": session.tokens_seen, **losses.as_dict()}
        journal.metrics.write("evaluation", event)
        with self.world.together():
            check_finite(strategy, f"after step {session.step}", "lower train.learning_rate and train anew")
            _check_held_out(losses, session.step)
        journal.forward("evaluation", session.step, event)
        if counter is not None:
            fastest = min(end - start for start, end in itertools.pairwise(ended))  # the first one warms up
            self._log_estimate(setup, counter, held_out, fastest * (len(ended) - 1), "of the held-out rows")
        return losses

    def _log_estimate(
        self, setup: Setup, counter: FlopCounter, held_out: float, seconds: float, speed: str, passes: int = 1
    ) -> None:
        """Estimate the run's time by held-out passes of so many FLOPs and seconds; a backward pass is often slower."""
        train, first_rows = self.config.train, range(min(self.config.train.sequences_per_step, 8))
        again = 4 / 3 if setup.record.activation_checkpointing else 1  # at most one more forward pass
        per_row = [again * counter.flops(*_sizes(setup.rows.row_at(n))) for n in first_rows]
        step = sum(per_row) / len(per_row) * train.sequences_per_step / held_out * seconds
        whole = train.steps * step + passes * seconds + (_COMPILING if is_compiled(setup.model) else 0)
        self.log(
            f"estimate  {timedelta(seconds=round(whole))} from here, by the speed {speed}: "
            f"{train.steps:,} steps of {step:,.0f} s, and {seconds:,.0f} s for held-out documents"
            + (", before and after" if passes > 1 else " again")
        )

    def _answer(self, name: str) -> None:
        how, kept = "ends when the operation that runs now is done", ""
        if self.session is not None and self.termination.noting:
            how = "finishes the step that runs now, saves it, and ends"
            if self.step_seconds > _LONG:
                how = "ends after the micro-batch that runs now, and saves the steps that are done"
            saved = self.session.saved
            kept = "; no step is saved so far" if saved is None else f"; step {saved:,} is saved so far"
        self.log(f"{name:<10}the run {how}{kept}; {name} again ends it at once")

    def _stops_within(self) -> bool:
        """Whether to leave a step between two of its micro-batches: any rank got a signal, and the step is long."""
        if self.step_seconds <= _LONG:
            return False
        (asked,) = self.world.sum([float(self.termination.asked is not None)])
        return asked > 0

    def _evaluate(self, session: Session) -> None:
        """Run the suite of `evaluation` if it is due; signals are obeyed between batches, and a failure ends no run."""
        if self.evaluation is not None and self.evaluation.due(session.step, self.config.train.steps):
            setup = session.setup
            self.evaluation.measure(
                setup.model,
                setup.source.tokenizer,
                session.step,
                self.log,
                lambda: self._check_stop(session),
                setup.record.training(),
            )

    def _check_stop(self, session: Session) -> None:
        """Between two steps: finish a save that all ranks have written, and save and stop if any rank got a signal."""
        asked = [float(self.termination.asked == number) for number in SIGNALS]
        *asked, written = self.world.sum([*asked, float(session.written)])
        if written == self.world.size:
            session.finish_saves()
        for (name, _, code), ranks in zip(SIGNALS.values(), asked, strict=True):
            if ranks:
                session.save(wait=True)
                saved = f"after step {session.step}, which is saved" if session.step else "in step 1; nothing is saved"
                message = f"stopped by {name} {saved}; to resume: torchtrain resume {self.folder.path}"
                raise Terminated(message if self.leads else "", code, agreed=True)

    @contextmanager
    def _finish_save_on_error(self, session: Session) -> Iterator[None]:
        """As `Session.finish_save_on_error`. SIGTERM, which torchrun sends when a process ended, waits for the save."""
        with session.finish_save_on_error():
            try:
                yield
            except BaseException:
                self.termination.note()
                raise


def _sizes(row: Mapping[str, np.ndarray]) -> tuple[int, int, int]:
    """Return the tokens, labels and live pairs of a row [T]."""
    documents_1T = torch.from_numpy(row["document_ids"])[None]
    labelled = int((row["shift_labels"] != IGNORED).sum())
    return int((documents_1T != PADDING).sum()), labelled, make_plan(documents_1T).live_pairs


def make_evaluation(config: Config, world: World) -> "TrainingEvaluation | None":
    """Return the suite of a training, if there is one. Raises UserError: several processes, or it does not fit."""
    if not config.evaluation.every:
        return None
    if world.size > 1 or config.distributed.zero_stage:
        raise UserError(
            "evaluation.every: works with one process without ZeRO; set it to 0, keep models "
            f"(save.last), and then: torchtrain evaluate {config.run.folder} --last {config.save.last}"
        )
    from torchtrain.evaluation.on_the_way import TrainingEvaluation

    return TrainingEvaluation(config.evaluation, config.pack, config.model.dtype, config.run.folder)


def _check_held_out(losses: HeldOut, step: int) -> None:
    loss = losses.overall.value
    if loss is not None and not math.isfinite(loss):
        raise UserError(
            f"the held-out loss after step {step} is {loss}: activations are not finite, but the weights are; "
            "set model.dtype: float32" + (", lower train.learning_rate" if step else "") + ", and train anew"
        )
