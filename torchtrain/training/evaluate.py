"""Held-out loss: the same packed rows of documents the training never sees, before it and after.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchtrain.attention import make_plan
from torchtrain.data import collate
from torchtrain.modeling.load import head_of, hidden_states
from torchtrain.training.loss import IGNORE, chunked_cross_entropy
from torchtrain.training.metrics import Losses, Mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HeldOut(Losses):
    """Losses on held-out rows, and apart from them that of the tokens at positions the model could not hold before.

    Args:
        domains: names, by index.
        own_positions: how many positions the model held before its context was extended.
    """

    def __init__(self, domains: Sequence[str], own_positions: int) -> None:
        super().__init__(domains)
        self.own_positions = own_positions
        self.new_positions = Mean()

    def as_dict(self) -> dict[str, Any]:
        """As `Losses.as_dict`, with `new_positions` where a token had one."""
        new = {"loss": self.new_positions.value, "labelled_tokens": self.new_positions.tokens}
        return super().as_dict() | ({"new_positions": new} if self.new_positions.tokens else {})


@torch.inference_mode()
def evaluate(
    model: "PreTrainedModel",
    rows: Iterable[Mapping[str, np.ndarray]],
    result: HeldOut,
    chunk: int,
    on_row: Callable[[str], None] = lambda status: None,
) -> HeldOut:
    """Add the losses of rows, one row at a time, to `result` and return it. The model is left in training mode.

    Args:
        model: what is evaluated.
        rows: arrays [T] by name, as `PackedRows` gives them.
        result: an empty `HeldOut`.
        chunk: tokens whose logits exist at one time.
        on_row: called with the loss so far, in words, after each row.
    """
    model.eval()
    for row in rows:
        batch = collate([row])
        plan = make_plan(batch["document_ids"]).to(model.device)
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        _, each_BT = chunked_cross_entropy(
            head_of(model), hidden_states(model, batch, plan), batch["shift_labels"], chunk
        )
        result.add(each_BT, batch)
        new_BT = (batch["position_ids"] >= result.own_positions) & (batch["shift_labels"] != IGNORE)
        result.new_positions.add(each_BT[new_BT])
        on_row(f"loss {result.overall}")
    model.train()
    return result
