"""Losses summed over all tokens, and over each domain.

Sums stay on the device until `read`. The host counts the tokens.

Legend: B batch · t tokens of this rank's part · G groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchtrain.distributed.world import World
from torchtrain.training.labels import Labels, find_labels


@dataclass
class Mean:
    """A mean loss in nats per token, kept as a sum (float64) and a count."""

    total: float = 0.0
    tokens: int = 0

    @property
    def value(self) -> float | None:
        """The mean; None without tokens."""
        return self.total / self.tokens if self.tokens else None

    def as_dict(self) -> dict[str, Any]:
        """Return `loss` and `labelled_tokens`."""
        return {"loss": self.value, "labelled_tokens": self.tokens}

    def __str__(self) -> str:
        return "none" if self.value is None else f"{self.value:.4f}"


class Losses:
    """The mean loss over all labelled tokens, and over each domain."""

    def __init__(self, domains: Sequence[str]) -> None:
        self.overall = Mean()
        self.by_domain = {domain: Mean() for domain in domains}
        self.gradient_norm: float | None = None  # `read` sets it
        self._sums_G: Tensor | None = None  # float64, added since the last `read`

    def labels_of(self, part: Mapping[str, Tensor]) -> Labels:
        """Find the labels of a micro-batch's part [B, t] on the host, and the labels of each mean."""
        return find_labels(part["shift_labels"], self.masks(part), part.get("weights"))

    def masks(self, part: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the mask [B, t] of the tokens of each of `means` but the first."""
        return [part["domain_ids"] == index for index in range(len(self.by_domain))]

    def add(self, each_Bt: Tensor, labels: Labels) -> None:
        """Add a micro-batch: the loss of each token, and the result of `labels_of` on the same device."""
        losses_n = each_Bt.flatten().index_select(0, labels.index_n)
        groups = [losses_n, *(losses_n.index_select(0, group) for group in labels.groups)]
        sums_G = torch.stack([group.double().sum() for group in groups])
        self._sums_G = sums_G if self._sums_G is None else self._sums_G + sums_G
        for mean, group in zip(self.means(), groups, strict=True):
            mean.tokens += len(group)

    def read(self, gradient_norm: Tensor | None = None) -> None:
        """Copy the sums, and the scalar norm if given, to the host in one wait for the device."""
        if self._sums_G is None:
            return
        asked = self._sums_G if gradient_norm is None else torch.cat([self._sums_G, gradient_norm.double().reshape(1)])
        values = asked.tolist()
        self.gradient_norm = None if gradient_norm is None else values.pop()
        for mean, total in zip(self.means(), values, strict=True):
            mean.total += total
        self._sums_G = None

    def means(self) -> list[Mean]:
        """Return all means, always in the same order."""
        return [self.overall, *self.by_domain.values()]

    def sum_over(self, world: World, gradient_norm: Tensor | None = None) -> None:
        """Call `read`, and sum the means over all ranks."""
        self.read(gradient_norm)
        means = self.means()
        sums = world.sum([x for mean in means for x in (mean.total, mean.tokens)])
        for mean, total, tokens in zip(means, sums[::2], sums[1::2], strict=True):
            mean.total, mean.tokens = total, int(tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return `loss`, `labelled_tokens`, and `domains` with the same two fields for each domain that had tokens."""
        present = {domain: mean for domain, mean in self.by_domain.items() if mean.tokens}
        return self.overall.as_dict() | {"domains": {domain: mean.as_dict() for domain, mean in present.items()}}
