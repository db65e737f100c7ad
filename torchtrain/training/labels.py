"""The tokens of a batch that have a label, and their groups, found on the host.

A boolean index or a count on the device would make the host wait for all earlier work of the device.

Legend: B batch · t tokens of this rank's part · n tokens that have a label.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtrain.marks import IGNORED


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of a rank's part of a micro-batch, and groups of them for sums of losses. `find_labels` makes it."""

    index_n: Tensor  # int64: indices into the B t tokens
    labels_n: Tensor  # int64: the next token of each
    groups: tuple[Tensor, ...] = ()  # int64 [members] each: indices into the n
    weights_n: Tensor | None = None  # float32: what the loss of each counts; None: 1

    def __len__(self) -> int:
        return len(self.index_n)

    @property
    def weight(self) -> float:
        """What all of them count together. On a GPU it waits for the device."""
        return len(self) if self.weights_n is None else float(self.weights_n.double().sum())

    def pin_memory(self) -> "Labels":
        """Return the labels in page-locked memory."""
        return self._each(Tensor.pin_memory)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Labels":
        """Return the labels on `device`."""
        return self._each(lambda x: x.to(device, non_blocking=non_blocking))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Labels":
        weights_n = None if self.weights_n is None else change(self.weights_n)
        return Labels(change(self.index_n), change(self.labels_n), tuple(map(change, self.groups)), weights_n)


def find_labels(shift_labels: Tensor, masks: Sequence[Tensor] = (), weights: Tensor | None = None) -> Labels:
    """Find the tokens that have a label, and one group of them for each mask.

    shift_labels: the next token of each, int64 [B, t] on the host; -100 where there is no loss.
    masks: boolean [B, t].
    weights: what the loss of each counts, float32 [B, t]; None: 1.
    """
    flat = shift_labels.flatten()
    index_n = (flat != IGNORED).nonzero().flatten()
    groups = tuple(mask.flatten()[index_n].nonzero().flatten() for mask in masks)
    return Labels(index_n, flat[index_n], groups, None if weights is None else weights.flatten()[index_n])
