"""One step's rows and its gradient, on one rank or many.

Legend: B batch · T tokens of a row.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from torchtrain.attention import make_plan
from torchtrain.config import TrainConfig
from torchtrain.data import PackedRows, collate
from torchtrain.distributed.shard import pad, part_of, rows_of_rank
from torchtrain.distributed.world import ALONE, World
from torchtrain.training.engine import Engine, Replicated
from torchtrain.training.loss import IGNORE
from torchtrain.training.metrics import Losses

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def step_batches(rows: PackedRows, step: int, train: TrainConfig, world: World = ALONE) -> list[dict[str, Tensor]]:
    """Return this rank's micro-batches of a step, whole rows [B, T] on the host.

    Rows follow each other by number, through epochs; those of a step are the same however they are dealt out.
    """
    numbers = rows_of_rank(step * train.sequences_per_step, train.sequences_per_step, train.micro_batch, world)
    return [collate([rows.row_at(i) for i in micro_batch]) for micro_batch in numbers]


def backward(
    model: "PreTrainedModel", batches: list[dict[str, Tensor]], domains: list[str], chunk: int
) -> tuple[Losses, int]:
    """`accumulate` for a model on one device: the gradient is left in its parameters, or in an `Optimizer`'s masters."""
    return accumulate(Replicated(model, None, World(device=model.device)), batches, domains, chunk)


def accumulate(engine: Engine, batches: list[dict[str, Tensor]], domains: list[str], chunk: int) -> tuple[Losses, int]:
    """Add up the gradient of the mean loss over all labelled tokens of the step, whatever rank and micro-batch they are in.

    Args:
        engine: its model in training mode.
        batches: this rank's micro-batches of the step, whole rows [B, T] on the host.
        domains: names, by index.
        chunk: tokens whose logits exist at one time.

    Returns:
        The losses, and the live (query, key) pairs, both of the whole step.
    """
    world = engine.world
    batches = [pad(batch, world.sequence_parallel) for batch in batches]
    parts = [part_of(batch, world) for batch in batches]
    (labelled,) = world.sum([sum(int((part["shift_labels"] != IGNORE).sum()) for part in parts)])
    losses, live_pairs = Losses(domains), 0
    for number, (batch, part) in enumerate(zip(batches, parts, strict=True), start=1):
        plan = make_plan(batch["document_ids"])
        live_pairs += plan.live_pairs
        part = {name: tensor.to(world.device, non_blocking=True) for name, tensor in part.items()}
        total, each_Bt = engine.losses(part, plan.to(world.device), chunk)
        # No token of the step has a label: a gradient of zeros.
        engine.backward(total / max(labelled, 1), last=number == len(batches))
        losses.add(each_Bt, part)
    losses.sum_over(world)
    (live_pairs,) = world.sum([live_pairs])
    return losses, int(live_pairs) // world.sequence_parallel
