"""Best fit decreasing: pieces of documents into rows with the fewest cuts (arXiv 2404.10830, section 3).

2.4 million documents take seconds: pieces of one size are placed together, and which rows have how much room is
kept as bits, so that the least room that a piece fits in is found at once.
"""

import numpy as np

_WORD = 1024  # bits of a Python int that are looked at together


def fit(
    lengths: np.ndarray, overhead: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cut what is longer than a row into whole rows and a rest, and put the largest piece first where the least room is
    left.

    Of rows with the same room the one that was filled last is taken. In a row pieces stand in the order of their
    documents, not of their sizes.

    Args:
        lengths: int64 [n], tokens of each document, positive.
        overhead: int64 [n], what each of its pieces spends besides, less than `capacity`.
        capacity: tokens of a row.

    Returns:
        The document, start and stop (excluded) of every piece, row after row, int64 each; and the number of the first
        piece of each row, with how many pieces there are at the end.
    """
    room = capacity - overhead
    pieces = -(-lengths // room)
    document = np.repeat(np.arange(len(lengths)), pieces)
    within = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = within * room[document]
    stop = np.minimum(start + room[document], lengths[document])
    row = _place(stop - start + overhead[document], capacity)
    order = np.argsort(row, kind="stable")
    first = np.searchsorted(row[order], np.arange(row.max(initial=-1) + 2))
    return document[order], start[order], stop[order], first


def _place(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece, int64."""
    order = np.argsort(-sizes, kind="stable")
    distinct, begins, counts = np.unique(-sizes[order], return_index=True, return_counts=True)
    row_of_place = np.zeros(len(sizes), dtype=np.int64)
    least = int(sizes.min(initial=capacity))
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows by their room, the last filled at the end
    words = [0] * (capacity // _WORD + 1)  # bit r: some row has room r; by words, and which words have any
    used = rows = 0
    for size, place, count in zip((-distinct).tolist(), begins.tolist(), counts.tolist(), strict=True):
        while count:
            word = size // _WORD
            bits = words[word] >> size % _WORD
            later = used >> word + 1
            if bits:
                room = size + _lowest(bits)
            elif later:
                word += 1 + _lowest(later)
                room = word * _WORD + _lowest(words[word])
            else:
                room = capacity
            if bits or later:
                row = with_room[room].pop()
                if not with_room[room]:
                    words[word] ^= 1 << room % _WORD
                    if not words[word]:
                        used ^= 1 << word
            else:
                row, rows = rows, rows + 1
            # The row that took a piece has the least room for the next of the same size, as long as that fits.
            taken = min(room // size, count)
            row_of_place[place : place + taken] = row
            place, count, room = place + taken, count - taken, room - taken * size
            if room >= least:
                if not with_room[room]:
                    words[room // _WORD] |= 1 << room % _WORD
                    used |= 1 << room // _WORD
                with_room[room].append(row)
    row_of = np.empty_like(row_of_place)
    row_of[order] = row_of_place
    return row_of


def _lowest(bits: int) -> int:
    """Return the place of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
