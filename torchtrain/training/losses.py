"""Losses summed per group of tokens: over all, and per domain.

Sums stay on the device until they are read. How many tokens there are is known on the host.

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
    """A loss in nats per token, kept as sum (float64) and count so that parts add up exactly."""

    total: float = 0.0
    tokens: int = 0

    @property
    def value(self) -> float | None:
        """The mean, or None of no tokens."""
        return self.total / self.tokens if self.tokens else None

    def __str__(self) -> str:
        return "none" if self.value is None else f"{self.value:.4f}"


class Losses:
    """The mean loss over all labelled tokens, and per domain.

    Under `pack.cross_document_targets` the anchor has a label and no domain: it counts in `overall` alone.
    """

    def __init__(self, domains: Sequence[str]) -> None:
        self.overall = Mean()
        self.by_domain = {domain: Mean() for domain in domains}
        self.gradient_norm: float | None = None  # read together with the sums
        self._sums_G: Tensor | None = None  # float64, of what was added and not yet read

    def labels_of(self, part: Mapping[str, Tensor]) -> Labels:
        """Find on the host the labels of a micro-batch's part [B, t], and those of each mean."""
        return find_labels(part["shift_labels"], self.masks(part))

    def masks(self, part: Mapping[str, Tensor]) -> list[Tensor]:
        """Return which tokens [B, t] each of `means` but the first takes."""
        return [part["domain_ids"] == index for index in range(len(self.by_domain))]

    def add(self, each_Bt: Tensor, labels: Labels) -> None:
        """Count one micro-batch: the loss of each token, and what `labels_of` returned, on the same device."""
        losses_n = each_Bt.flatten().index_select(0, labels.index_n)
        groups = [losses_n, *(losses_n.index_select(0, group) for group in labels.groups)]
        sums_G = torch.stack([group.double().sum() for group in groups])
        self._sums_G = sums_G if self._sums_G is None else self._sums_G + sums_G
        for mean, group in zip(self.means(), groups, strict=True):
            mean.tokens += len(group)

    def read(self, gradient_norm: Tensor | None = None) -> None:
        """Bring what was added into the means: the host waits for the device once, for the norm, a scalar, too."""
        if self._sums_G is None:
            return
        asked = self._sums_G if gradient_norm is None else torch.cat([self._sums_G, gradient_norm.double().reshape(1)])
        values = asked.tolist()
        self.gradient_norm = None if gradient_norm is None else values.pop()
        for mean, total in zip(self.means(), values, strict=True):
            mean.total += total
        self._sums_G = None

    def means(self) -> list[Mean]:
        """Everything that is counted, always in the same order."""
        return [self.overall, *self.by_domain.values()]

    def sum_over(self, world: World, gradient_norm: Tensor | None = None) -> None:
        """Read, and add up what all ranks have counted, each its own tokens."""
        self.read(gradient_norm)
        means = self.means()
        sums = world.sum([x for mean in means for x in (mean.total, mean.tokens)])
        for mean, total, tokens in zip(means, sums[::2], sums[1::2], strict=True):
            mean.total, mean.tokens = total, int(tokens)

    def as_dict(self) -> dict[str, Any]:
        """For `metrics.jsonl`: `loss`, `labelled_tokens`, and `domains` with the same two for each that had tokens."""
        present = {domain: mean for domain, mean in self.by_domain.items() if mean.tokens}
        return {
            "loss": self.overall.value,
            "labelled_tokens": self.overall.tokens,
            "domains": {d: {"loss": mean.value, "labelled_tokens": mean.tokens} for d, mean in present.items()},
        }
