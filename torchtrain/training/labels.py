"""The tokens of a batch that have a label, and their groups, found on the host.

A boolean index or a count on the device would make the host wait for all earlier work of the device.

Legend: B batch · t tokens of this rank's part · n tokens that have a label.
"""

from collections.abc import Sequence
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

    def __len__(self) -> int:
        return len(self.index_n)

    def pin_memory(self) -> "Labels":
        """Return the labels in page-locked memory."""
        return Labels(self.index_n.pin_memory(), self.labels_n.pin_memory(), tuple(x.pin_memory() for x in self.groups))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Labels":
        """Return the labels on `device`."""
        index_n, labels_n, *groups = (
            x.to(device, non_blocking=non_blocking) for x in (self.index_n, self.labels_n, *self.groups)
        )
        return Labels(index_n, labels_n, tuple(groups))


def find_labels(shift_labels: Tensor, masks: Sequence[Tensor] = ()) -> Labels:
    """Find the tokens that have a label, and one group of them for each mask.

    shift_labels: the next token of each, int64 [B, t] on the host; -100 where there is no loss.
    masks: boolean [B, t].
    """
    flat = shift_labels.flatten()
    index_n = (flat != IGNORED).nonzero().flatten()
    groups = tuple(mask.flatten()[index_n].nonzero().flatten() for mask in masks)
    return Labels(index_n, flat[index_n], groups)
