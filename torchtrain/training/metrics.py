"""What is measured: losses summed per group of tokens, and files of events, one line each.

`metrics.jsonl` holds what was computed: a run that was interrupted leaves the same bytes as one that was not. How long it took
stands in `timing.jsonl`, which only grows.

Legend: B batch · T tokens of a row.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from torch import Tensor

from anchorline.errors import UserError, disk_fault
from anchorline.files import FileEntry, entry_of, sync
from torchtrain.distributed.world import World
from torchtrain.training.loss import IGNORE

NOTHING = FileEntry(bytes=0, sha256=hashlib.sha256().hexdigest())


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
    """A file of events such as `metrics.jsonl`, a context manager: an event survives the process once `write` has returned.

    A last line that an interruption cut off goes when the file is opened.

    Args:
        path: the file; None writes nothing (on all ranks but the first).
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._file: FileIO | None = None

    def __enter__(self) -> "MetricsFile":
        if self._path is not None:
            self._file = self._path.open("ab", buffering=0)  # what could not be written is not tried again on closing
            os.truncate(self._path, self._path.read_bytes().rfind(b"\n") + 1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, event: str, values: Mapping[str, Any]) -> None:
        """Append one line: the event's name, then its values; null for a number that is not finite.

        Raises:
            UserError: the disk does not take it.
        """
        if self._file is None or self._path is None:
            return
        left = memoryview((json.dumps(finite({"event": event, **values}), allow_nan=False) + "\n").encode())
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise UserError(
                f"{self._path}: could not be written: {disk_fault(error)}; "
                f"mend that, then: torchtrain resume {self._path.parent}"
            ) from None

    def settle(self) -> FileEntry:
        """Flush the file to the disk; return what it is so far."""
        if self._file is None or self._path is None:
            return NOTHING
        os.fsync(self._file.fileno())
        return entry_of(self._path)


def check_beginning(path: Path, entry: FileEntry) -> None:
    """Check that a file of events begins with what it was once.

    Raises:
        UserError: it does not.
    """
    if (entry_of(path, entry.bytes) if path.exists() else NOTHING) != entry:
        raise UserError(
            f"{path}: has been changed: it does not begin with the {entry.bytes:,} bytes that belong to the checkpoint; "
            "put it back, or begin anew with --step 0"
        )


def rewind(path: Path, entry: FileEntry) -> None:
    """Cut a file of events, which `check_beginning` has passed, back to what it was."""
    path.touch()
    os.truncate(path, entry.bytes)
    sync(path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the events of a `metrics.jsonl`, in order; a last line that is still being written is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def finite(value: Any) -> Any:
    """Return a tree with null for every number that is not finite: JSON has none."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
