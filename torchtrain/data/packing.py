"""The packing plan: from document lengths and a seed to the spans of any row, computed before a token is read.

Documents are shuffled, laid end to end and cut where a row is full; a document that is cut goes on in the next row as a new
span. The plan knows nothing of workers or ranks, so the order of rows does not depend on them.
"""

from bisect import bisect_right
from typing import Literal, NamedTuple

import numpy as np

# What a random stream is for: the first entry of its spawn key, so that no two streams coincide.
SHUFFLE, INTERLEAVE, HELD_OUT = range(3)


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of one purpose: the same for the same seed and key, independent for any other."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


class Span(NamedTuple):
    """Tokens start..stop (exclusive, never empty) of a document, in one row."""

    document: int
    start: int
    stop: int


class PackPlan:
    """One epoch's rows.

    Every token of every document stands in exactly one row, or is counted in `dropped_tokens`.

    Args:
        lengths: int [n], tokens of each document, all positive.
        capacity: tokens that a row holds, its anchor not counted.
        overhead: int [n], tokens that each span of a document spends besides its own (its tag); less than `capacity`.
        seed: seeds the order of documents.
        epoch: another order for each.
        last: `pad` keeps the last row if it is not full, `drop` leaves it out.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        capacity: int,
        overhead: np.ndarray | None = None,
        seed: int = 0,
        epoch: int = 0,
        last: Literal["pad", "drop"] = "pad",
    ) -> None:
        lengths = np.asarray(lengths, dtype=np.int64)
        overhead = np.zeros_like(lengths) if overhead is None else np.asarray(overhead, dtype=np.int64)
        assert lengths.min(initial=1) > 0, "a document without tokens"
        assert overhead.max(initial=0) < capacity, "a span's overhead fills the row"
        self.capacity = capacity
        self.order = random_stream(seed, SHUFFLE, epoch).permutation(len(lengths))
        self._lengths = lengths[self.order]
        self._overhead = overhead[self.order]
        starts, filled = _cut(self._lengths, self._overhead, capacity)
        total = int(lengths.sum())
        if last == "drop" and 0 < filled < capacity:
            starts.pop()
            self._end = 
        self._starts = np.array(starts, dtype=np.int64).reshape(-1, 2)
