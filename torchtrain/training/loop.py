"""The recipe: config -> model and rows -> held-out loss -> steps -> held-out loss -> export -> report.

Legend: B batch · T tokens of a row.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import Tensor

from torchtrain.attention import make_plan
from torchtrain.config import Config, TrainConfig
from torchtrain.data import PackedRows, collate
from torchtrain.errors import UserError
from torchtrain.modeling.load import head_of, hidden_states
from torchtrain.training.evaluate import HeldOut, evaluate
from torchtrain.training.export import export
from torchtrain.training.flops import FlopCounter, peak_flops
from torchtrain.training.folder import RunFolder
from torchtrain.training.loss import IGNORE, chunked_cross_entropy
from torchtrain.training.metrics import Losses, MetricsFile, read_metrics
from torchtrain.training.optimizer import Optimizer
from torchtrain.training.report import Display, plot, step_status, tell_tokenising
from torchtrain.training.schedule import learning_rate
from torchtrain.training.setup import Setup, set_up

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Result:
    """What a run gave: held-out losses, tokens trained on, tokens a second, and the exported model's folder."""

    before: HeldOut
    after: HeldOut
    tokens_seen: int
    tokens_per_second: float
    model: Path


def train(config: Config, *, replace: bool = False, console: Console | None = None) -> Result:
    """Train as the config says; leave the model, `metrics.jsonl`, `loss.png` and the config in the run's folder.

    Args:
        config: what `load_config` returned.
        replace: remove the run that the folder holds.
        console: where people look; default: standard error.

    Raises:
        UserError: something does not fit, and then no run folder was made; or the loss is not finite any more.
    """
    console = console or Console(stderr=True)
    folder = RunFolder(config.run.folder)
    folder.check(replace, config.data.cache)
    torch.manual_seed(config.run.seed)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    with console.status("preparing") as spinner:
        setup = set_up(config, say, tell_tokenising(console, spinner, say))
    folder.create(config, setup.record, replace)

    with MetricsFile(folder.metrics) as metrics, Display(console) as display:

        def held_out(step: int, tokens_seen: int) -> HeldOut:
            losses = HeldOut(setup.store.domains, setup.own_positions)
            on_row = display.task("held out", len(setup.held_out))
            evaluate(setup.model, setup.held_out, losses, config.train.loss_chunk, on_row)
            metrics.write("evaluation", {"step": step, "tokens_seen": tokens_seen, **losses.as_dict()})
            return losses

        before = held_out(0, 0)
        on_step = display.task("training", config.train.steps)
        tokens_seen, seconds = 0, 0.0
        for event in steps(config.train, setup):
            tokens_seen, seconds = event["tokens_seen"], seconds + event["seconds"]
            metrics.write("step", event)
            on_step(step_status(event))
        after = held_out(config.train.steps, tokens_seen)

    say(f"exporting to {folder.model}")
    export(setup.model, setup.tokenizer, folder.partial_model, folder.model)
    plot(read_metrics(folder.metrics), folder.plot)
    return Result(before, after, tokens_seen, tokens_seen / seconds, folder.model)


def steps(train: TrainConfig, setup: Setup) -> Iterator[dict[str, Any]]:
    """Train, step by step; yield the event of each."""
    optimizer = Optimizer(setup.model, train)
    counter = FlopCounter.of(setup.model)
    peak = peak_flops(setup.device, setup.model.dtype)
    tokens_seen = 0
    for step in range(train.steps):
        started = time.perf_counter()
        rate = learning_rate(step, train)
        batches = step_batches(setup.rows, step, train)
        losses, live_pairs = backward(setup.model, batches, setup.store.domains, train.loss_chunk)
        norm = optimizer.step(rate)
        if not (math.isfinite(losses.overall.total) and math.isfinite(norm)):
            raise UserError(
                f"step {step + 1}: the loss is {losses.overall.value} and its gradient's norm {norm}; lower "
                f"train.learning_rate ({train.learning_rate}), warm up longer, or set model.dtype: float32"
            )
        seconds = time.perf_counter() - started
        tokens = sum(int((batch["document_ids"] >= 0).sum()) for batch in batches)
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
        yield event | ({"mfu": flops / seconds / peak} if peak else {})


def step_batches(rows: PackedRows, step: int, train: TrainConfig) -> list[dict[str, Tensor]]:
    """Return a step's micro-batches, on the host. Rows follow each other by number, through epochs."""
    first = step * train.sequences_per_step
    starts = range(first, first + train.sequences_per_step, train.micro_batch)
    return [collate([rows.row_at(i) for i in range(start, start + train.micro_batch)]) for start in starts]


def backward(
    model: "PreTrainedModel", batches: list[dict[str, Tensor]], domains: list[str], chunk: int
) -> tuple[Losses, int]:
    """Add up the gradient of the mean loss over all labelled tokens of the step, whatever micro-batch they stand in.

    Args:
        model: in training mode.
        batches: the step's micro-batches, tensors [B, T] on the host.
        domains: names, by index.
        chunk: tokens whose logits exist at one time.

    Returns:
        The losses, and the live (query, key) pairs of the step.
    """
    labelled = sum(int((batch["shift_labels"] != IGNORE).sum()) for batch in batches)
    losses, live_pairs = Losses(domains), 0
    for batch in batches:
        plan = make_plan(batch["document_ids"])
        live_pairs += plan.live_pairs
        batch = {name: tensor.to(model.device, non_blocking=True) for name, tensor in batch.items()}
        hidden_BTM = hidden_states(model, batch, plan.to(model.device))
        total, each_BT = chunked_cross_entropy(head_of(model), hidden_BTM, batch["shift_labels"], chunk)
        (total / max(labelled, 1)).backward()  # no token of the step has a label: a gradient of zeros
        losses.add(each_BT, batch)
    return losses, live_pairs
