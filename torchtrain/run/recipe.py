"""The recipe: config -> model and rows -> held-out loss -> steps -> held-out loss -> export -> report.

It is the same on one process and on many: every rank runs it, rank 0 writes and speaks. It is the same, too, for a run that
begins and for one that goes on: `resume` only takes up a state first.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

import torchtrain
from anchorline.errors import UserError
from anchorline.files import PARTIAL, entry_of, expanded, resolve
from torchtrain.checkpoint.identity import check_config, check_identity, otherwise
from torchtrain.checkpoint.manifest import Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config, TrainConfig
from torchtrain.data.files import find_files
from torchtrain.distributed.layout import check_layout
from torchtrain.distributed.world import World, join
from torchtrain.errors import Terminated
from torchtrain.planning.flops import FlopCounter, peak_flops
from torchtrain.run.finite import check_finite
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import hold
from torchtrain.run.report import Display, plot, step_status, tell_tokenising
from torchtrain.run.session import Session, layout_of, memory_gib
from torchtrain.run.setup import Setup, set_up
from torchtrain.run.termination import Termination
from torchtrain.run.writers import Writers, check_writers
from torchtrain.training.events import NOTHING, MetricsFile, check_beginning, read_metrics, rewind
from torchtrain.training.guard import Guard
from torchtrain.training.held_out import HeldOut, evaluate
from torchtrain.training.step import step_batches, take_step
from torchtrain.training.strategy import Strategy, make_strategy


@dataclass(frozen=True)
class Result:
    """What a run gave: held-out losses, tokens trained on, tokens a second, and the exported model's folder."""

    before: HeldOut
    after: HeldOut
    tokens_seen: int
    tokens_per_second: float
    model: Path


def train(config: Config, *, replace: bool = False, console: Console | None = None) -> Result | None:
    """Train as the config says; leave the model, `metrics.jsonl`, `loss.png` and the config in the run's folder.

    Every process that torchrun started calls this.

    Args:
        config: what `load_config` returned.
        replace: remove the run that the folder holds.
        console: where people look; default: standard error.

    Returns:
        What the run gave, on rank 0; None on the others.

    Raises:
        UserError: something does not fit, and then no run folder was made; or a step is bad (`torchtrain.training.guard`),
            or a checkpoint cannot be written.
        OtherRankFailed: another rank found what does not fit, and says so.
        Terminated: SIGTERM was obeyed, and what there was is saved.
    """
    with Termination() as termination, join(config) as world:
        return _Run(config, console, world, termination).begin(replace)


def resume(config: Config, *, step: int | None = None, console: Console | None = None) -> Result | None:
    """Go on with the run that `run.folder` holds, as if it had never been interrupted.

    Every process that torchrun started calls this. As many processes as before, spread alike, leave bitwise what the
    uninterrupted run would have; otherwise rows, their order and the restored weights are the same.

    Args:
        config: the run's own, but for what `torchtrain.checkpoint.identity.FREE` names.
        step: from the checkpoint of which step; 0 begins anew; default: the last.
        console: where people look; default: standard error.

    Returns:
        As `train`; None, too, if the run is finished.

    Raises:
        UserError: there is no run; what decides the numbers has changed; a checkpoint is damaged; or as `train`.
        OtherRankFailed, Terminated: as `train`.
    """
    with Termination() as termination, join(config) as world:
        return _Run(config, console, world, termination).go_on(step)


class _Run:
    def __init__(self, config: Config, console: Console | None, world: World, termination: Termination) -> None:
        self.config, self.world, self.termination = config, world, termination
        self.leads = world.rank == 0
        self.console = (console or Console(stderr=True)) if self.leads else Console(quiet=True)
        self.say = partial(self.console.print, markup=False, highlight=False, soft_wrap=True)
        with world.together():
            self.folder = RunFolder(config.run.folder)

    def begin(self, replace: bool) -> Result | None:
        with self.world.together():
            self._check()
            if self.leads:
                self.folder.check(replace, self.config.data.cache, _local_sources(self.config))
        setup = self._set_up()
        with ExitStack() as held:
            with self.world.together():
                if self.leads:
                    sources = _local_sources(self.config)
                    held.enter_context(self.folder.create(self.config, setup.record, replace, sources))
            self._see_folder()
            return self._train(setup, None)

    def go_on(self, step: int | None) -> Result | None:
        with ExitStack() as held:
            with self.world.together():
                self._check()
                if self.leads:
                    self.folder.check_run()
                    held.enter_context(hold(self.folder.record))
            self._see_folder()
            with self.world.together():
                record = self.folder.check_run()
                check_config(record["config"], self.config)
            with self.world.together():
                finished = self.leads and self.folder.finished
                if finished and step is None:
                    self.folder.check_model()
            if self.world.from_first(finished) and step is None:
                self.say(f"{self.folder.path}: is finished; its model is in {self.folder.model}")
                return None
            checkpoints = Checkpoints(self.folder.checkpoints)
            with self.world.together():
                if self.leads:
                    self.folder.sweep()
                    if step != 0:
                        checkpoints.sweep()
                        self._check_not_gone(checkpoints)
            manifest = None if step == 0 else checkpoints.open(step, self.world)
            if manifest is None:
                self.say(f"begin     anew in {self.folder.path}" + ("" if step == 0 else ": it has no checkpoint"))
            else:
                self.say(f"go on     from step {manifest.progress.step:,} of {self.folder.path}")
            done, events = (0, NOTHING) if manifest is None else (manifest.progress.step, manifest.progress.metrics)
            with self.world.together():
                if manifest is not None:
                    check_config(manifest.config, self.config)
                if self.leads:
                    check_beginning(self.folder.metrics, events)
                    self.folder.check_forgetting(done, self.config.train.steps)
            setup = self._set_up(partial(check_identity, record["identity"] if manifest is None else manifest.identity))
            if manifest is not None and (changed := otherwise(manifest, layout_of(self.config, setup, self.world))):
                self.say(f"warning   the last digits may differ from those of an uninterrupted run: {changed}")
            with self.world.together():
                if self.leads:  # in this order: killed in between, it is taken up at the same step
                    self.folder.reopen()
                    if manifest is None:
                        with MetricsFile(self.folder.timing) as timing:
                            timing.write("begin", {"step": 0})
                        checkpoints.give_up()
                        checkpoints.sweep()
                    checkpoints.forget_after(done)
                    self.folder.forget_after(done, self.config.train.steps)
                    rewind(self.folder.metrics, events)
            return self._train(setup, manifest)

    def _check_not_gone(self, checkpoints: Checkpoints) -> None:
        """Check that there are checkpoints where there were some: their disk may not be mounted."""
        if checkpoints.steps():
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
                f"{checkpoints.folder}: its checkpoints are gone, and there was one of step {saved}; mount their disk or put them "
                f"back, {anew}"
            )

    def _see_folder(self) -> None:
        """Check that all ranks see the run that rank 0 made or found."""
        record = self.world.from_first(entry_of(self.folder.record) if self.leads else NOTHING)
        with self.world.together():
            self.folder.check_shared(record)
        self.termination.advice = f"to go on from the last checkpoint: torchtrain resume {self.folder.path}"

    def _check(self) -> None:
        resolve("data.cache", self.config.data.cache)
        check_layout(self.config, self.world.size)
        check_writers(self.config)

    def _set_up(self, check: Callable[[dict[str, Any]], None] = lambda identity: None) -> Setup:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.config.run.seed)
        with self.world.together(), self.console.status("preparing") as spinner:
            return set_up(self.config, self.say, tell_tokenising(self.console, spinner, self.say), self.world, check)

    def _train(self, setup: Setup, manifest: Manifest | None) -> Result | None:
        config, folder, world, leads = self.config, self.folder, self.world, self.leads
        counter = FlopCounter.of(setup.model)  # before a strategy cuts the weights up
        strategy = make_strategy(setup.model, setup.engine, config, world)
        with ExitStack() as stack:
            with world.together():
                metrics = stack.enter_context(MetricsFile(folder.metrics if leads else None))
                timing = stack.enter_context(MetricsFile(folder.timing if leads else None))
            display = stack.enter_context(Display(self.console))
            session = Session(config, folder, setup, strategy, metrics, timing, self.say)
            if manifest is not None:
                session.take_up(manifest)
            with world.together():
                writers = stack.enter_context(Writers(config, folder.path, session.step)) if leads else None

            def stop_if_asked() -> None:
                (stop,) = world.sum([float(self.termination.asked)])
                if stop:
                    session.save()
                    self._terminated(session.step)

            def held_out(step: int, tokens_seen: int, between: Callable[[], None] = lambda: None) -> HeldOut:
                losses = HeldOut(setup.store.domains, setup.own_positions)
                micro_batch = 1 if world.size == 1 else config.train.micro_batch
                advance = display.task("held out", -(-len(setup.held_out) // (micro_batch * world.data_parallel)))

                def on_row(status: str) -> None:
                    advance(status)
                    between()

                evaluate(setup.model, setup.held_out, losses, config.train.loss_chunk, on_row, strategy, micro_batch)
                event = {"step": step, "tokens_seen": tokens_seen, **losses.as_dict()}
                metrics.write("evaluation", event)
                with world.together():
                    check_finite(strategy, f"after step {step}", "lower train.learning_rate and train anew")
                    _check_held_out(losses, step)
                if writers:
                    writers.write("evaluation", step, event)
                return losses

            before = session.before = session.before or held_out(0, 0)
            first, tokens_before = session.step, session.tokens_seen
            seconds = 0.0
            on_step = display.task("training", config.train.steps, first)
            with self.termination.noted():
                session.export_if_kept()  # of the step that was saved last, if the run was interrupted right then
                for event, speed in steps(
                    config.train, setup, strategy, counter, session.guard, first, session.tokens_seen
                ):
                    session.done(event["step"], event["tokens_seen"])
                    metrics.write("step", event)
                    if session.step == first + 1:
                        since_start = time.perf_counter() - torchtrain.STARTED
                        speed |= {"since_start": since_start, "resumed": manifest is not None}
                    timing.write("step", {"step": session.step, **speed})
                    seconds += speed["seconds"]
                    on_step(step_status(event | speed))
                    if writers:
                        writers.write("step", session.step, event)
                        writers.write("speed", session.step, speed)
                    if session.due:
                        session.save()
                        session.export_if_kept()
                    stop_if_asked()
                after = held_out(config.train.steps, session.tokens_seen, stop_if_asked)
                saved = session.saved
                if not saved:  # without a checkpoint all would be lost: it comes to its end
                    self._export(session)
            if saved:
                self._export(session)
            with world.together():
                if leads:
                    _plot(folder)
                    folder.finish(session.step)
        tokens = session.tokens_seen - tokens_before
        speed = tokens / seconds if seconds else 0.0
        return Result(before, after, session.tokens_seen, speed, folder.model) if leads else None

    def _export(self, session: Session) -> None:
        self.say(f"exporting to {self.folder.model}")
        session.export(self.folder.model)  # which refuses weights that are not finite

    def _terminated(self, step: int) -> None:
        saved = f"stopped by SIGTERM after step {step}, which is saved; to go on: torchtrain resume {self.folder.path}"
        raise Terminated(saved if self.leads else "", agreed=True)


def steps(
    train: TrainConfig,
    setup: Setup,
    strategy: Strategy,
    counter: FlopCounter,
    guard: Guard,
    first: int = 0,
    tokens_seen: int = 0,
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Train, step by step; yield what each computed, the same on every rank, and how fast.

    Args:
        train: settings.
        setup: rows and domains.
        strategy: holds the state after `first` steps.
        counter: of the whole model.
        guard: finds steps that must not update.
        first: steps done so far.
        tokens_seen: in these.

    Raises:
        UserError, OtherRankFailed: a bad step; see `Guard.leave_out`.
    """
    world = strategy.world
    peak = peak_flops(world.device, setup.model.dtype)
    for step in range(first, train.steps):
        started = time.perf_counter()
        batches = step_batches(setup.rows, step, train, world)
        result = take_step(strategy, batches, setup.store.domains, step, train, guard.fault_of_loss)
        losses, live_pairs, rate, norm = result.losses, result.live_pairs, result.learning_rate, result.gradient_norm
        fault = result.fault or guard.fault_of_norm(norm)
        values = {**losses.as_dict(), "learning_rate": rate, "gradient_norm": norm}
        if fault is None:
            guard.passed(losses.overall.value)
        else:
            with world.together():
                # Weights that are no numbers make every step a bad one: leaving steps out would be of no use.
                check_finite(
                    strategy, f"before step {step + 1}", f"so {fault}; lower train.learning_rate and train anew"
                )
            with world.together():
                guard.leave_out(step + 1, fault, values)
        seconds = time.perf_counter() - started
        (tokens,) = world.sum([sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)])
        tokens = int(tokens) // world.sequence_parallel
        tokens_seen += tokens
        flops = counter.flops(tokens, losses.overall.tokens, live_pairs)
        event = {"step": step + 1, "tokens_seen": tokens_seen, **values, "live_pairs": live_pairs, "flops": flops}
        speed: dict[str, Any] = {
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "flops_per_second": flops / seconds,
        }
        if peak:
            speed["mfu"] = flops / seconds / (peak * world.size)
        if (memory := memory_gib(world.device)) is not None:
            speed["memory_gib"] = memory
        yield event | ({"left_out": fault} if fault else {}), speed


def _local_sources(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield what of this machine's files a run is made of, with the field that names it."""
    yield from _with_links("model.source", expanded(config.model.source))
    for number, source in enumerate(config.data.sources):
        if source.files is not None:
            yield from ((f"data.sources.{number}.files", path) for path in find_files(source.files))
        elif source.dataset is not None:
            yield from _with_links(f"data.sources.{number}.dataset", expanded(source.dataset))


def _with_links(field: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield a folder and what links lead out of it: a hub's cache holds nothing else."""
    yield field, folder
    for place, folders, names in os.walk(folder):
        yield from ((field, path) for name in (*folders, *names) if (path := Path(place, name)).is_symlink())


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


def _plot(folder: RunFolder) -> None:
    """Draw beside, then rename: nobody sees a half."""
    partial_plot = folder.plot.with_name(folder.plot.name + PARTIAL)
    plot(read_metrics(folder.metrics), partial_plot)
    partial_plot.replace(folder.plot)
