"""One step's rows, its gradient and its update, on one rank or many.

Legend: B batch · T tokens of a row · t tokens of this rank's part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from torchtrain.attention.hf import KEEPS_ANCHOR
from torchtrain.attention.masks import layer_windows
from torchtrain.config import TrainConfig
from torchtrain.data import stack_rows
from torchtrain.distributed.shard import assign_rows
from torchtrain.distributed.world import ALONE, World
from torchtrain.training.losses import Losses
from torchtrain.training.micro_batch import MicroBatch, make_micro_batch
from torchtrain.training.schedule import learning_rate
from torchtrain.training.strategy import Strategy

OnLosses = Callable[[Tensor, Mapping[str, Any]], None]


class Rows(Protocol):
    """An endless sequence of rows, such as `torchtrain.data.PackedRows`."""

    def row_at(self, index: int) -> dict[str, np.ndarray]:
        """Return the five arrays of a row, int64 [T]."""
        ...


@dataclass(frozen=True)
class StepResult:
    """What a step computed, the same on every rank."""

    losses: Losses
    live_pairs: int  # mean over layers, which may have windows
    learning_rate: float
    gradient_norm: float  # before clipping; nan if the loss was bad
    fault: str | None  # why no weight was updated

    def as_dict(self) -> dict[str, Any]:
        """As `Losses.as_dict`, with the learning rate and the gradient's norm."""
        return {**self.losses.as_dict(), "learning_rate": self.learning_rate, "gradient_norm": self.gradient_norm}


def step_batches(
    rows: Rows, step: int, train: TrainConfig, domains: Sequence[str], world: World = ALONE, engine: str = ""
) -> list[MicroBatch]:
    """Return this rank's micro-batches of a step, on the host; the step's rows are the same for any number of ranks."""
    numbers = assign_rows(step * train.sequences_per_step, train.sequences_per_step, train.micro_batch, world)
    batches = [stack_rows([rows.row_at(i) for i in micro_batch]) for micro_batch in numbers]
    return make_micro_batches(batches, domains, world, engine)


def make_micro_batches(
    batches: Sequence[dict[str, Tensor]], domains: Sequence[str], world: World = ALONE, engine: str = ""
) -> list[MicroBatch]:
    """Return the micro-batches of whole rows [B, T] on the host, for `accumulate`."""
    labels_of = Losses(domains).labels_of
    return [make_micro_batch(batch, world, labels_of, engine) for batch in batches]


def take_step(
    strategy: Strategy,
    batches: Sequence[MicroBatch],
    domains: Sequence[str],
    step: int,
    train: TrainConfig,
    fault_of_loss: Callable[[float | None], str | None],
    on_losses: OnLosses | None = None,
) -> StepResult:
    """Take one step of training: the gradient, and the update unless the loss or the gradient is bad.

    strategy: with its model in training mode.
    batches: from `step_batches`.
    domains: names, by index.
    step: its number, from 0.
    fault_of_loss: returns what is wrong with the mean loss, or None. With a fault no weight is updated.
    on_losses: as for `accumulate`.
    """
    rate = learning_rate(step, train)
    losses, live_pairs = accumulate(strategy, batches, domains, train.loss_chunk, on_losses)
    fault, norm = fault_of_loss(losses.overall.value), float("nan")
    if fault is None:
        norm = strategy.step(rate, losses.gradient_norm)
    else:
        strategy.drop()
    return StepResult(losses, live_pairs, rate, norm, fault)


def accumulate(
    strategy: Strategy,
    batches: Sequence[MicroBatch],
    domains: Sequence[str],
    chunk: int | None,
    on_losses: OnLosses | None = None,
) -> tuple[Losses, int]:
    """Compute the gradient of the mean loss over the step's labelled tokens of all ranks and micro-batches: the sum of
    each loss times its weight, divided by the sum of the weights. Losses are returned without weights.

    strategy: with its model in training mode.
    batches: this rank's micro-batches of the step, on the host.
    domains: names, by index.
    chunk: tokens whose logits exist at one time; None: `default_chunk`.
    on_losses: called after each micro-batch with each token's loss [B, t], detached, and this rank's part.
    Returns the losses and the number of live (query, key) pairs of the whole step. The losses hold the gradient's norm
        if the strategy knows it before `step`.
    """
    world = strategy.world
    losses = Losses(domains)
    weight = sum_weights(batches, world) or 1.0  # a step in which no token counts gets a gradient of zeros
    for number, batch in enumerate(batches, start=1):
        batch = batch.to(world.device)
        total, each_Bt = strategy.losses(batch.part, batch.plan, chunk, 1 / weight)
        strategy.backward(total / weight, last=number == len(batches))
        losses.add(each_Bt, batch.labels)
        if on_losses is not None:
            on_losses(each_Bt, batch.part)
    losses.sum_over(world, strategy.norm())
    windows = layer_windows(strategy.model.config)
    keep_anchor = set(windows) != {None} and any(getattr(m, KEEPS_ANCHOR, False) for m in strategy.model.modules())
    (live_pairs,) = world.sum([sum(batch.rows.mean_live_pairs(windows, keep_anchor) for batch in batches)])
    return losses, int(live_pairs) // world.sequence_parallel


def sum_weights(batches: Sequence[MicroBatch], world: World) -> float:
    """Return the sum of the step's weights (without weights, of its labelled tokens) over all ranks."""
    (weight,) = world.sum([sum(batch.labels.weight for batch in batches)])
    return weight
