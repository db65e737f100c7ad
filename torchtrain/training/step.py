"""One step's rows, its gradient and its update, on one rank or many.

Legend: B batch · T tokens of a row · t tokens of this rank's part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from torchtrain.attention import make_plan
from torchtrain.config import TrainConfig
from torchtrain.data import collate
from torchtrain.distributed.shard import pad, part_of, rows_of_rank
from torchtrain.distributed.world import ALONE, World
from torchtrain.training.losses import Losses
from torchtrain.training.schedule import learning_rate
from torchtrain.training.strategy import Strategy

OnLosses = Callable[[Tensor, dict[str, Any]], None]


class Rows(Protocol):
    """An endless sequence of rows, such as `torchtrain.data.PackedRows`."""

    def row_at(self, index: int) -> dict[str, np.ndarray]:
        """Return the five arrays of a row, int64 [T]."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What a step computed, the same on every rank."""

    losses: Losses
    live_pairs: int
    learning_rate: float
    gradient_norm: float  # before clipping; nan if it was not asked for
    fault: str | None  # why nothing was updated

    def as_dict(self) -> dict[str, Any]:
        """For `metrics.jsonl`: as `Losses.as_dict`, with the learning rate and the gradient's norm."""
        return {**self.losses.as_dict(), "learning_rate": self.learning_rate, "gradient_norm": self.gradient_norm}


def step_batches(rows: Rows, step: int, train: TrainConfig, world: World = ALONE) -> list[dict[str, Tensor]]:
    """Return this rank's micro-batches of a step, whole rows [B, T] on the host.

    Rows follow each other by number, through epochs; those of a step are the same however they are dealt out.
    """
    numbers = rows_of_rank(step * train.sequences_per_step, train.sequences_per_step, train.micro_batch, world)
    return [collate([rows.row_at(i) for i in micro_batch]) for micro_batch in numbers]


def take_step(
    strategy: Strategy,
    batches: list[dict[str, Tensor]],
    domains: list[str],
    step: int,
    train: TrainConfig,
    fault_of_loss: Callable[[float | None], str | None],
    on_losses: OnLosses | None = None,
) -> StepResult:
    """Take one step of training: its gradient, and the update unless loss or gradient is bad.

    Args:
        strategy: its model in training mode.
        batches: what `step_batches` returned.
        domains: names, by index.
        step: its number, from 0.
        train: settings.
        fault_of_loss: says what is wrong with the mean loss, or None; then nothing is updated.
        on_losses: as `accumulate`.
    """
    rate = learning_rate(step, train)
    losses, live_pairs = accumulate(strategy, batches, domains, train.loss_chunk, on_losses)
    fault, norm = fault_of_loss(losses.overall.value), float("nan")
    if fault is None:
        norm = strategy.step(rate)
    else:
        strategy.drop()
    return StepResult(losses, live_pairs, rate, norm, fault)


def accumulate(
    strategy: Strategy,
    batches: list[dict[str, Tensor]],
    domains: list[str],
    chunk: int,
    on_losses: OnLosses | None = None,
) -> tuple[Losses, int]:
    """Add up the gradient of the mean loss over all labelled tokens of the step, on all ranks and in all micro-batches.

    Args:
        strategy: its model in training mode.
        batches: this rank's micro-batches of the step, whole rows [B, T] on the host.
        domains: names, by index.
        chunk: tokens whose logits exist at one time.
        on_losses: called after each micro-batch with the loss of every token [B, t], detached, and this rank's part of
            it.

    Returns:
        The losses, and the live (query, key) pairs, both of the whole step.
    """
    world = strategy.world
    batches = [pad(batch, world.sequence_parallel) for batch in batches]
    losses, live_pairs = Losses(domains), 0
    parts = [part_of(batch, world) for batch in batches]
    parts = [part | {"labels": losses.labels_of(part)} for part in parts]
    labels = count_labels(parts, world)
    for number, (batch, part) in enumerate(zip(batches, parts, strict=True), start=1):
        plan = make_plan(batch["document_ids"])
        live_pairs += plan.live_pairs
        part = {name: x.to(world.device, non_blocking=True) for name, x in part.items()}
        total, each_Bt = strategy.losses(part, plan.to(world.device), chunk)
        # max: a step in which no token has a label gets a gradient of zeros.
        strategy.backward(total / max(labels, 1), last=number == len(batches))
        losses.add(each_Bt, part["labels"])
        if on_losses is not None:
            on_losses(each_Bt, part)
    losses.sum_over(world)
    (live_pairs,) = world.sum([live_pairs])
    return losses, int(live_pairs) // world.sequence_parallel


def count_labels(parts: list[dict[str, Any]], world: World) -> float:
    """Return how many tokens of a step have a label, those of all ranks: what every rank divides its losses by."""
    (labels,) = world.sum([sum(len(part["labels"]) for part in parts)])
    return labels
