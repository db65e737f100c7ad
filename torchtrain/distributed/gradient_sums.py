"""Gradients added up over ranks while the backward pass that makes them goes on.

What is large is sent alone, in place; what is small is sent together, in a bucket of at most `SMALL` elements. All
ranks send in one order, the parameters' last first, which is about the order in which their gradients come: one that
comes early waits for its turn. A bucket's turn is that of the last that it waits for: norms of all layers lie in one,
and what is large would wait with it for the first layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SMALL = 1_000_000  # elements: 4 MB of float32, beyond which a sum takes longer than it takes to begin


class GradientSums:
    """Sums of the gradients in `.grad` of some tensors, the same tensors on every rank.

    Args:
        owners: whose gradients are summed.
    """

    def __init__(self, owners: Sequence[Tensor]) -> None:
        self._buckets = _cut(owners)
        self._bucket_of = {id(owner): number for number, bucket in enumerate(self._buckets) for owner in bucket}
        self._missing: list[int] = []  # by bucket: how many gradients have yet to come; empty between two steps
        self._sent: list[tuple[Any, Tensor]] = []

    def begin(self) -> None:
        """Send from now on what `note` says is there."""
        self._missing, self._sent = [len(bucket) for bucket in self._buckets], []

    def note(self, owner: Tensor) -> None:
        """Take note that a gradient is whole. Between two steps, and before `begin`, it is not yet."""
        if self._missing:
            self._missing[self._bucket_of[id(owner)]] -= 1
            self._send(lambda number: self._missing[number] == 0)

    def finish(self) -> None:
        """Send the rest, zeros where this rank has no gradient, and wait for the sums, which are then in `.grad`."""
        self._send(lambda _: True)
        for bucket, (work, sums) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            if len(bucket) > 1:
                vector_to_parameters(sums, [_gradient(owner) for owner in bucket])
        self._missing, self._sent = [], []

    def _send(self, ready: Callable[[int], bool]) -> None:
        while len(self._sent) < len(self._buckets) and ready(len(self._sent)):
            bucket = self._buckets[len(self._sent)]
            gradients = [_gradient(owner) for owner in bucket]
            together = gradients[0] if len(bucket) == 1 else parameters_to_vector(gradients)
            self._sent.append((dist.all_reduce(together, async_op=True), together))


def _cut(owners: Sequence[Tensor]) -> list[list[Tensor]]:
    place = {id(owner): number for number, owner in enumerate(owners)}
    buckets, last = [], None  # the last bucket of small ones, if one more may be added to it
    for owner in reversed(owners):
        if owner.numel() > SMALL:
            buckets.append([owner])
        elif last is not None and last[0].dtype == owner.dtype and sum(x.numel() for x in [*last, owner]) <= SMALL:
            last.append(owner)
        else:
            buckets.append(last := [owner])
    return sorted(buckets, key=lambda bucket: place[id(bucket[-1])], reverse=True)


def _gradient(owner: Tensor) -> Tensor:
    if owner.grad is None:
        owner.grad = torch.zeros_like(owner)
    return owner.grad
