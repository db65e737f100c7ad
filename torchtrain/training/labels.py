"""Which tokens of a batch have a label, and to which groups they belong: found on the host, before anything is sent to
the device.

A device that is asked which tokens they are (a boolean index, a count) makes the host wait until it has done all that
was asked before.

Legend: B batch · t tokens of this rank's part · n tokens that have a label.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtrain.marks import IGNORED


@dataclass(frozen=True, eq=False)
class Labels:
    """The labels of a rank's part of a micro-batch, for the loss, and groups of them, for sums of losses.

    Made by `find_labels`.
    """

    index_n: Tensor  # int64: which of the B t tokens
    labels_n: Tensor  # int64: the next token of each
    groups: tuple[Tensor, ...] = ()  # int64 [members] each: which of the n

    def __len__(self) -> int:
        return len(self.index_n)

    def pin_memory(self) -> "Labels":
        """Return them in page-locked memory."""
        return Labels(self.index_n.pin_memory(), self.labels_n.pin_memory(), tuple(x.pin_memory() for x in self.groups))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> "Labels":
        """Return them with their tensors on `device`."""
        index_n, labels_n, *groups = (
            x.to(device, non_blocking=non_blocking) for x in (self.index_n, self.labels_n, *self.groups)
        )
        return Labels(index_n, labels_n, tuple(groups))


def find_labels(shift_labels: Tensor, masks: Sequence[Tensor] = ()) -> Labels:
    """Find the tokens that have a label, and those of them that each mask takes.

    Args:
        shift_labels: the next token of each, int64 [B, t] on the host, -100 where no loss is taken.
        masks: boolean, of the same shape.
    """
    flat = shift_labels.flatten()
    index_n = (flat != IGNORED).nonzero().flatten()
    groups = tuple(mask.flatten()[index_n].nonzero().flatten() for mask in masks)
    return Labels(index_n, flat[index_n], groups)
