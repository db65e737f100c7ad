"""The packing plan: from document lengths and a seed to the spans of any row, before a token is read.

- `sequential`, the paper's: documents are shuffled, laid end to end and cut where a row is full; a document that is cut
  goes on in the next row as a new span.
- `by_length`: the same with documents sorted by length. If the last row is dropped, the order begins at a random
  document; otherwise the longest documents would always be dropped. Rows with similar amounts of attention form groups,
  so no rank waits long for another. The groups are shuffled. In every epoch a group begins where a step begins.
- `best_fit` (arXiv 2404.10830): only documents longer than a row are cut. The pieces are placed from the largest to the
  smallest, each in the row with the least room that still holds it. The room that is left becomes padding.

The plan knows nothing of workers or ranks, so the order of rows does not depend on them.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from typing import Literal, NamedTuple

import numpy as np

from torchtrain.data.streams import ROWS, SHUFFLE, TAIL, random_stream

Strategy = Literal["sequential", "best_fit", "by_length"]


class Span(NamedTuple):
    """Tokens start..stop (excluded, never empty) of the document with this index in the plan's lengths, in one row."""

    document_index: int
    start: int
    stop: int


class PackPlan:
    """One epoch's rows. Every token of every document is in exactly one row, or is counted in `dropped_tokens`.

    lengths: int [n], tokens of each document, all positive.
    capacity: tokens that a row holds, its anchor not counted.
    overhead: int [n], tokens that each span of a document adds to its own (its tag), less than `capacity`.
    seed: seeds the order of documents and of rows.
    epoch: each has another order.
    last: `pad` keeps a last row that is not full, `drop` leaves it out; `best_fit` knows no such row.
    together: rows that are taken at a time, of like lengths in `by_length`: a step's.
    before: rows of all epochs before this one; in `by_length` the first ones fill the step that they left open.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        capacity: int,
        overhead: np.ndarray,
        seed: int,
        epoch: int = 0,
        last: Literal["pad", "drop"] = "pad",
        strategy: Strategy = "sequential",
        together: int = 1,
        before: int = 0,
    ) -> None:
        assert lengths.shape == overhead.shape
        assert lengths.min(initial=1) > 0, "a document without tokens"
        assert overhead.max(initial=0) < capacity, "a span's overhead fills the row"
        assert last == "pad" or strategy != "best_fit"
        order = random_stream(seed, SHUFFLE, epoch).permutation(len(lengths))
        if strategy == "by_length":
            order = order[np.argsort(lengths[order], kind="stable")]
            if last == "drop":
                # The last documents may be left out, and they must not always be the longest: begin behind the document
                # of a drawn token, and continue with the shortest behind the longest.
                ends = np.cumsum(lengths[order])
                drawn = random_stream(seed, TAIL, epoch).integers(ends[-1])
                order = np.roll(order, -int(np.searchsorted(ends, drawn, side="right")))
        own, spent = lengths[order].astype(np.int64), overhead[order].astype(np.int64)
        if strategy == "best_fit":
            spans = _fit_best(own, spent, capacity)
        else:
            bounds, room = _cut(own, spent, capacity)
            if last == "drop" and room:
                bounds.pop()
            spans = _spans_between(np.array(bounds, dtype=np.int64), own)
        place, self._start, self._stop, self._first = spans
        self._document = order[place]
        self._row = np.arange(len(self._first) - 1)
        if strategy == "best_fit":
            self._row = random_stream(seed, ROWS, epoch).permutation(self._row)
        elif strategy == "by_length":
            pairs = np.add.reduceat((self._stop - self._start) ** 2, self._first[:-1])
            by_pairs = np.argsort(pairs, kind="stable")
            # What fills up the last step of the epoch before, which ended with its rows of the most pairs.
            begins = max(0, len(by_pairs) - -before % together)
            shuffled = _shuffle_groups(by_pairs[:begins], together, random_stream(seed, ROWS, epoch))
            self._row = np.concatenate([by_pairs[begins:], shuffled])
        self.tokens = int((self._stop - self._start).sum())
        self.dropped_tokens = int(own.sum()) - self.tokens
        self.overhead_tokens = int(spent[place].sum())
        self.padding_tokens = len(self) * capacity - self.tokens - self.overhead_tokens
        self.cuts = int((self._start > 0).sum())  # how often a document goes on in another row

    def __len__(self) -> int:
        return len(self._row)

    @property
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """The document and the tokens of every span, int64 [spans] each."""
        return self._document, self._stop - self._start

    def live_pairs(self) -> np.ndarray:
        """Return the pairs of tokens that attention within documents computes in each row, int64 [rows]."""
        length = self._stop - self._start
        return np.add.reduceat(length * (length + 1) // 2, self._first[:-1])[self._row]

    def spans(self, row: int) -> list[Span]:
        """Return what a row holds, in storage order."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a plan of {len(self)}")
        filled = int(self._row[row])
        part = slice(int(self._first[filled]), int(self._first[filled + 1]))
        columns = (self._document[part], self._start[part], self._stop[part])
        return [Span(*span) for span in zip(*(column.tolist() for column in columns), strict=True)]


def _spans_between(bounds: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return place, start and stop of every span, and the number of each row's first, from where rows begin and end."""
    place, token = bounds.T
    count = place[1:] + (token[1:] > 0) - place[:-1]
    first = np.concatenate([[0], np.cumsum(count)])
    places = np.repeat(place[:-1] - first[:-1], count) + np.arange(first[-1])
    start, stop = np.zeros(len(places), dtype=np.int64), lengths[places]
    start[first[:-1]] = token[:-1]
    ends_inside = token[1:] > 0
    stop[first[1:][ends_inside] - 1] = token[1:][ends_inside]
    return places, start, stop, first


def _shuffle_groups(rows: np.ndarray, together: int, random: np.random.Generator) -> np.ndarray:
    """Shuffle groups of rows that follow each other; what is left over for a whole group stays at the end."""
    whole = len(rows) // together * together
    groups = rows[:whole].reshape(-1, together)
    return np.concatenate([groups[random.permutation(len(groups))].reshape(-1), rows[whole:]])


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


def _fit_best(
    lengths: np.ndarray, overhead: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut what is longer than a row into rows and a rest. Put the largest piece first where the least room is left.

    Of rows with the same room the one that was filled last is taken. In a row pieces have the order of their documents.
    Returns place, start and stop of every piece, row after row, and the number of the first piece of each row, as
    `_spans_between` does.
    """
    room = capacity - overhead
    pieces = -(-lengths // room)
    place = np.repeat(np.arange(len(lengths)), pieces)
    within = np.arange(len(place)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = within * room[place]
    stop = np.minimum(start + room[place], lengths[place])
    row = _rows_of_pieces(stop - start + overhead[place], capacity)
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
    return place[order], start[order], stop[order], first


def _rows_of_pieces(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece, int64. Pieces of one size are placed together."""
    order = np.argsort(-sizes, kind="stable")
    distinct, begins, counts = np.unique(-sizes[order], return_index=True, return_counts=True)
    row_of_piece = np.zeros(len(sizes), dtype=np.int64)
    least = int(sizes.min(initial=capacity))
    rows_with_room: dict[int, list[int]] = defaultdict(list)  # by room; the row that was filled last is at the end
    rooms: list[int] = []  # that some row has, sorted
    rows = 0
    for size, piece, count in zip((-distinct).tolist(), begins.tolist(), counts.tolist(), strict=True):
        while count:
            at = bisect_left(rooms, size)
            if at < len(rooms):
                room = rooms[at]
                row = rows_with_room[room].pop()
                if not rows_with_room[room]:
                    del rooms[at]
            else:
                room, row, rows = capacity, rows, rows + 1
            # The row that took a piece has the least room for the next of the same size, as long as that fits.
            taken = min(room // size, count)
            row_of_piece[order[piece : piece + taken]] = row
            piece, count, room = piece + taken, count - taken, room - taken * size
            if room >= least:
                if not rows_with_room[room]:
                    insort(rooms, room)
                rows_with_room[room].append(row)
    return row_of_piece
