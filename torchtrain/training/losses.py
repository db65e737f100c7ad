"""Losses summed per group of tokens: over all, and per domain.

Legend: B batch · T tokens of a row · n tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtrain.distributed.world import World
from torchtrain.marks import IGNORED


@dataclass
class Mean:
    """A loss in nats per token, kept as sum (float64) and count so that parts add up exactly."""

    total: float = 0.0
    tokens: int = 0

    def add(self, losses_n: Tensor) -> None:
        """Count the losses of n tokens."""
        self.total += losses_n.double().sum().item()
        self.tokens += losses_n.numel()

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

    def add(self, each_BT: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count one batch: the loss of each token, and the batch for its labels and domains."""
        labelled_BT = batch["shift_labels"] != IGNORED
        self.overall.add(each_BT[labelled_BT])
        for index, mean in enumerate(self.by_domain.values()):
            mean.add(each_BT[labelled_BT & (batch["domain_ids"] == index)])

    def means(self) -> list[Mean]:
        """Everything that is counted, always in the same order."""
        return [self.overall, *self.by_domain.values()]

    def sum_over(self, world: World) -> None:
        """Add up what all ranks have counted, each its own tokens."""
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
