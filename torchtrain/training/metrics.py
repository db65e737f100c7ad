"""What is measured: losses summed per group of tokens, and `metrics.jsonl`, one line an event.

Legend: B batch · T tokens of a row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torch import Tensor

from torchtrain.distributed.world import World
from torchtrain.training.loss import IGNORE


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
        labelled_BT = batch["shift_labels"] != IGNORE
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


class MetricsFile:
    """`metrics.jsonl`, a context manager: every event is on disk when `write` returns.

    Args:
        path: the file; None writes nothing (on all ranks but the first).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: TextIO | None = None

    def __enter__(self) -> "MetricsFile":
        self._file = self._path and self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line: the event's name, then its values."""
        if self._file is not None:
            self._file.write(json.dumps({"event": event, **values}) + "\n")
            self._file.flush()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events of a `metrics.jsonl`, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
