"""The recipe: config -> model and rows -> held-out loss -> steps -> held-out loss -> export -> report.

It is the same on one process and on many: every rank runs it, rank 0 writes and speaks.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchtrain.config import Config, TrainConfig
from torchtrain.distributed.layout import check_layout
from torchtrain.distributed.world import World, join
from torchtrain.errors import OtherRankFailed, UserError
from torchtrain.training.engine import Engine, make_engine
from torchtrain.training.evaluate import HeldOut, evaluate
from torchtrain.training.export import export
from torchtrain.training.flops import FlopCounter, peak_flops
from torchtrain.training.folder import RunFolder
from torchtrain.training.metrics import MetricsFile, read_metrics
from torchtrain.training.report import Display, plot, step_status, tell_tokenising
from torchtrain.training.schedule import learning_rate
from torchtrain.training.setup import Setup, set_up
from torchtrain.training.step import accumulate, backward, step_batches

__all__ = ["Result", "backward", "step_batches", "steps", "train"]


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
        UserError: something does not fit, and then no run folder was made; or the loss is not finite any more.
        OtherRankFailed: another rank found what does not fit, and says so.
    """
    with join(config) as world:
        return _train(config, replace, console or Console(stderr=True), world)


def _train(config: Config, replace: bool, console: Console, world: World) -> Result | None:
    leads = world.rank == 0
    console = console if leads else Console(quiet=True)
    folder = RunFolder(config.run.folder)
    with world.together():
        check_layout(config, world.size)
        if leads:
            folder.check(replace, config.data.cache)
    torch.manual_seed(config.run.seed)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with world.together(), console.status("preparing") as spinner:
        setup = set_up(config, say, tell_tokenising(console, spinner, say), world)
    with world.together():
        if leads:
            folder.create(config, setup.record, replace)
    counter = FlopCounter.of(setup.model)  # before an engine cuts the weights up
    engine = make_engine(setup.model, setup.engine, config, world)

    with MetricsFile(folder.metrics if leads else None) as metrics, Display(console) as display:

        def held_out(step: int, tokens_seen: int) -> HeldOut:
            losses = HeldOut(setup.store.domains, setup.own_positions)
            micro_batch = 1 if world.size == 1 else config.train.micro_batch
            on_row = display.task("held out", -(-len(setup.held_out) // (micro_batch * world.data_parallel)))
            evaluate(setup.model, setup.held_out, losses, config.train.loss_chunk, on_row, engine, micro_batch)
            metrics.write("evaluation", {"step": step, "tokens_seen": tokens_seen, **losses.as_dict()})
            return losses

        before = held_out(0, 0)
        on_step = display.task("training", config.train.steps)
        tokens_seen, seconds = 0, 0.0
        for event in steps(config.train, setup, engine, counter):
            tokens_seen, seconds = event["tokens_seen"], seconds + event["seconds"]
            metrics.write("step", event)
            on_step(step_status(event))
        after = held_out(config.train.steps, tokens_seen)

    say(f"exporting to {folder.model}")
    weights = engine.weights()
    if leads:
        export(setup.model, setup.tokenizer, folder.partial_model, folder.model, weights)
        plot(read_metrics(folder.metrics), folder.plot)
    world.wait()
    return Result(before, after, tokens_seen, tokens_seen / seconds, folder.model) if leads else None


def steps(train: TrainConfig, setup: Setup, engine: Engine, counter: FlopCounter) -> Iterator[dict[str, Any]]:
    """Train, step by step; yield the event of each, the same on every rank but for the seconds.

    Raises:
        UserError: loss or gradient is not finite. All ranks find it, rank 0 says it.
        OtherRankFailed: on the others.
    """
    world = engine.world
    peak = peak_flops(world.device, setup.model.dtype)
    tokens_seen = 0
    for step in range(train.steps):
        started = time.perf_counter()
        rate = learning_rate(step, train)
        batches = step_batches(setup.rows, step, train, world)
        losses, live_pairs = accumulate(engine, batches, setup.store.domains, train.loss_chunk)
        norm = engine.step(rate)
        if not (math.isfinite(losses.overall.total) and math.isfinite(norm)):
            if world.rank:
                raise OtherRankFailed("rank 0 stopped")
            raise UserError(
                f"step {step + 1}: the loss is {losses.overall.value} and its gradient's norm {norm}; lower "
                f"train.learning_rate ({train.learning_rate}), warm up longer, or set model.dtype: float32"
            )
        seconds = time.perf_counter() - started
        (tokens,) = world.sum([sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)])
        tokens = int(tokens) // world.sequence_parallel
        tokens_seen += tokens
        flops = counter.flops(tokens, losses.overall.tokens, live_pairs)
        event = {
            "step": step + 1,
            "tokens_seen": tokens_seen,
            **losses.as_dict(),
            "learning_rate": rate,
            "gradient_norm": norm,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "live_pairs": live_pairs,
            "flops": flops,
        }
        yield event | ({"mfu": flops / seconds / (peak * world.size)} if peak else {})
