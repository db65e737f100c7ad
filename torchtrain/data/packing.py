"""The packing plan: from document lengths and a seed to the spans of any row, before a token is read.

Documents are shuffled, laid end to end and cut where a row is full; a document that is cut goes on in the next row as a
new span. The plan knows nothing of workers or ranks, so the order of rows does not depend on them.
"""

from bisect import bisect_right
from typing import Literal, NamedTuple

import numpy as np

# What a random stream is for: the head of its spawn key, so that no two purposes share one.
SHUFFLE, INTERLEAVE, HELD_OUT, SAMPLE_FILES, SAMPLE, MIX = range(6)


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of one purpose: the same for the same seed and key, independent of every other."""
    # A spawn key, not a list of seeds: SeedSequence([a, b]) and SeedSequence([a, b, 0]) are the same.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))


class Span(NamedTuple):
    """Tokens start..stop (stop excluded, never empty) of a document, in one row.

    `document_index` finds the document in the `lengths` that the plan was given.
    """

    document_index: int
    start: int
    stop: int


class PackPlan:
    """One epoch's rows. Every token of every document stands in exactly one row, or is counted in `dropped_tokens`.

    Args:
        lengths: int [n], tokens of each document, all positive.
        capacity: tokens that a row holds, its anchor not counted.
        overhead: int [n], what each span of a document spends besides its own tokens (its tag), less than `capacity`.
        seed: seeds the order of documents.
        epoch: each has an order of its own.
        last: `pad` keeps a last row that is not full, `drop` leaves it out.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        capacity: int,
        overhead: np.ndarray,
        seed: int,
        epoch: int = 0,
        last: Literal["pad", "drop"] = "pad",
    ) -> None:
        assert lengths.shape == overhead.shape
        assert lengths.min(initial=1) > 0, "a document without tokens"
        assert overhead.max(initial=0) < capacity, "a span's overhead fills the row"
        self._order = random_stream(seed, SHUFFLE, epoch).permutation(len(lengths))
        self._lengths = lengths[self._order].astype(np.int64)
        overhead = overhead[self._order].astype(np.int64)
        bounds, room = _cut(self._lengths, overhead, capacity)
        if last == "drop" and room:
            bounds.pop()
        # Row i goes from bounds[i] to bounds[i + 1], each (place in the order, token of that document).
        self._bounds = np.array(bounds, dtype=np.int64)

        place, token = self._bounds.T
        past_last_span = place[1:] + (token[1:] > 0)
        overhead_before = np.concatenate([[0], np.cumsum(overhead)])
        self.tokens = int(self._lengths[: place[-1]].sum() + token[-1])
        self.dropped_tokens = int(self._lengths.sum()) - self.tokens
        self.overhead_tokens = int((overhead_before[past_last_span] - overhead_before[place[:-1]]).sum())
        self.padding_tokens = len(self) * capacity - self.tokens - self.overhead_tokens

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def spans(self, row: int) -> list[Span]:
        """Return what a row holds, in storage order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a plan of {len(self)}")
        (first, start), (last, stop) = self._bounds[row].tolist(), self._bounds[row + 1].tolist()
        spans = []
        for place in range(first, last + (stop > 0)):
            end = stop if place == last else int(self._lengths[place])
            spans.append(Span(int(self._order[place]), start if place == first else 0, end))
        return spans


def _cut(lengths: np.ndarray, overhead: np.ndarray, capacity: int) -> tuple[list[tuple[int, int]], int]:
    """Fill rows in order; return where each begins, then where the last ends, and the room left in the last.

    `lengths` and `overhead` are in the shuffled order, and a place is one in it; a row begins at (place, token).

    Sequential, because a tag is spent again in each row that its document reaches; a search finds how many whole
    documents fit, so that the cost is that of the rows.
    """
    # Memory views, because they give Python ints many times faster than arrays give numpy's.
    length, spent = lengths.data, overhead.data
    whole = np.concatenate([[0], np.cumsum(lengths + overhead)]).data
    place, token, room = 0, 0, 0
    bounds = [(0, 0)]
    while place < len(length):
        room = capacity - spent[place]
        if length[place] - token > room:
            token += room
            room = 0
        else:
            room -= length[place] - token
            after = place + 1
            place = bisect_right(whole, whole[after] + room, after) - 1
            room -= whole[place] - whole[after]
            # The next document does not fit whole; a part of it does, if there is room for more than its tag.
            begins = place < len(length) and room > spent[place]
            token = room - spent[place] if begins else 0
            if begins:
                room = 0
        bounds.append((place, token))
    return bounds, room
