"""All-reduce of gradients while the backward pass runs.

Small gradients share buckets of at most `SMALL` elements; a larger one is reduced alone, in place. All ranks must
reduce the buckets in one order: that of their last gradients, as the backward pass makes them. By its first gradient, a
bucket with the norms of all layers would make large gradients wait for the first layer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

SMALL = 1_000_000  # elements: 4 MB of float32; a larger all-reduce takes longer than its start


class GradientSums:
    """Sums over all ranks of the gradients in `.grad` of `owners`, the same parameters on every rank."""

    def __init__(self, owners: Sequence[Tensor]) -> None:
        self._buckets = _make_buckets(owners)
        self._bucket_of = {id(owner): number for number, bucket in enumerate(self._buckets) for owner in bucket}
        self._missing: list[int] = []  # gradients that each bucket still lacks; empty between two steps
        self._sent: list[tuple[Any, Tensor]] = []

    def begin(self) -> None:
        """Reduce buckets as soon as `note` completes them."""
        self._missing, self._sent = [len(bucket) for bucket in self._buckets], []

    def note(self, owner: Tensor) -> None:
        """Record that a gradient is complete. Calls before `begin` are ignored: more micro-batches follow."""
        if self._missing:
            self._missing[self._bucket_of[id(owner)]] -= 1
            self._send(lambda number: self._missing[number] == 0)

    def finish(self) -> None:
        """Reduce the rest, with zeros for missing gradients, and wait until all sums are in `.grad`."""
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


def _make_buckets(owners: Sequence[Tensor]) -> list[list[Tensor]]:
    place = {id(owner): number for number, owner in enumerate(owners)}
    buckets, last = [], None  # last: the newest bucket of small gradients
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
