"""Held-out loss: on the same packed rows before and after training, of documents that training never sees.

Legend: B batch · T tokens of a row · t tokens of this rank's part.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchtrain.config import MOST_TOKENS
from torchtrain.data import stack_rows
from torchtrain.data.weights import effective_contexts
from torchtrain.distributed.shard import assign_held_out
from torchtrain.distributed.world import World
from torchtrain.training.losses import Losses, Mean
from torchtrain.training.micro_batch import MicroBatch, make_micro_batch
from torchtrain.training.strategy import Replicated, Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 256  # tokens in one sample of an interval: losses of neighbouring tokens are correlated


class HeldOut(Losses):
    """Losses on held-out rows, with separate means for the positions that training adds to the model's context, and for
    effective contexts from each power of two to the next.

    domains: names, by index.
    own_positions: the model's number of positions before training.
    """

    def __init__(self, domains: Sequence[str], own_positions: int) -> None:
        super().__init__(domains)
        self.own_positions = own_positions
        self.new_positions = Mean()
        self.by_context = {1 << power: Mean() for power in range(MOST_TOKENS.bit_length())}  # from where each begins
        self.blocks: list[float] = []  # mean losses of BLOCK labelled tokens of a row each

    def masks(self, part: Mapping[str, Tensor]) -> list[Tensor]:
        """As `Losses.masks`."""
        contexts = [(part["contexts"] >= start) & (part["contexts"] < 2 * start) for start in self.by_context]
        return [*super().masks(part), part["position_ids"] >= self.own_positions, *contexts]

    def means(self) -> list[Mean]:
        """As `Losses.means`."""
        return [*super().means(), self.new_positions, *self.by_context.values()]

    def as_dict(self) -> dict[str, Any]:
        """As `Losses.as_dict`, with `new_positions` if there were such tokens, and `contexts` by effective context."""
        contexts = {str(start): mean.as_dict() for start, mean in self.by_context.items() if mean.tokens}
        new = {"new_positions": self.new_positions.as_dict()} if self.new_positions.tokens else {}
        return super().as_dict() | new | {"contexts": contexts}


@torch.no_grad()
def measure_held_out(
    model: "PreTrainedModel",
    rows: Sequence[Mapping[str, np.ndarray]],
    result: HeldOut,
    chunk: int | None,
    on_row: Callable[[str], None] = lambda status: None,
    strategy: Strategy | None = None,
    micro_batch: int = 1,
) -> HeldOut:
    """Add the losses of rows, arrays [T] by name, to an empty `result` and return it. The model stays in training mode.

    chunk: tokens whose logits exist at one time; None: `default_chunk`.
    on_row: called with the loss so far, as text, after each micro-batch.
    strategy: runs the model; default: on this process alone.
    """
    strategy = strategy or Replicated(model, None, World(device=model.device))
    world = strategy.world
    model.eval()
    found: list[Tensor] = []
    for first, dealt in assign_held_out(rows, micro_batch, world):
        dealt = [{**row, "contexts": effective_contexts(row["document_ids"])} for row in dealt]
        batch = make_micro_batch(stack_rows(dealt), world, result.labels_of).to(world.device)
        _, each_Bt = strategy.losses(batch.part, batch.plan, chunk)
        result.add(each_Bt, batch.labels)
        found.append(_losses_in_order(batch, each_Bt, first, world))
        result.read()
        total, tokens = world.sum([result.overall.total, result.overall.tokens])
        on_row(f"loss {Mean(total, int(tokens))}")
    result.sum_over(world)
    result.blocks = _means_of_blocks([of_batch for of_rank in world.gather(found) for of_batch in of_rank])
    model.train()
    return result


def _losses_in_order(batch: MicroBatch, each_Bt: Tensor, first: int, world: World) -> Tensor:
    """Return int64 [3, n] on the host of each labelled token: its row, its part of the row (a rank, or a document where
    ranks took whole ones), and the bits of its float32 loss; in their order within a part.
    """
    index_n, documents = batch.labels.index_n, batch.part["document_ids"]
    part_n = torch.full_like(index_n, world.sequence_rank)
    if world.whole_documents and documents.shape == each_Bt.shape:
        part_n = documents.flatten().index_select(0, index_n)
    row_n, losses_n = first + index_n // each_Bt.shape[1], each_Bt.flatten().index_select(0, index_n)
    return torch.stack([row_n, part_n, losses_n.float().view(torch.int32).long()]).cpu()


def _means_of_blocks(found: Sequence[Tensor]) -> list[float]:
    """Return the means of BLOCK losses each, row by row, whichever ranks found them."""
    row_n, part_n, bits_n = torch.cat(list(found), dim=1)
    losses_n = bits_n.int().view(torch.float32)
    order_n = part_n.argsort(stable=True)
    order_n = order_n[row_n[order_n].argsort(stable=True)]
    blocks: list[float] = []
    for losses in losses_n[order_n].split(row_n.bincount().tolist()):
        blocks += losses[: len(losses) // BLOCK * BLOCK].view(-1, BLOCK).mean(1).tolist()
    return blocks
