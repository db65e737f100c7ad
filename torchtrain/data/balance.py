"""How long ranks wait for one another: rows of one length differ in how much attention they hold.

Data-parallel ranks take a row each and then add their gradients up, so that a step's attention takes as long as that of
its fullest row. (Ranks that share a row by Ulysses have the same work.)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtrain.data.packing import PackPlan

RANKS = (8, 64, 512)


@dataclass(frozen=True)
class Balance:
    """Rows of one length dealt out to as many ranks, one each."""

    sequence_length: int
    ranks: int
    steps: int  # whole ones
    sequential: float  # live pairs of a step's fullest row over the mean of its rows, in the mean of steps
    by_length: float  # the same where a step's rows are alike (`pack.strategy`)


def balance_of(
    lengths: np.ndarray, row_lengths: Sequence[int], ranks: Sequence[int] = RANKS, seed: int = 0
) -> list[Balance]:
    """Simulate the first epoch.

    Args:
        lengths: int [n], tokens of each document.
        row_lengths: tokens of a row, the anchor not counted.
        ranks: how many rows are in work at a time; of more than there are rows, nothing is told.
        seed: of the order of documents.
    """
    found = []
    for T in row_lengths:
        none = np.zeros_like(lengths)
        in_order = PackPlan(lengths, T, none, seed).live_pairs()
        alike = np.sort(PackPlan(lengths, T, none, seed, strategy="by_length").live_pairs())
        for count in (count for count in ranks if count <= len(in_order)):
            found.append(Balance(T, count, len(in_order) // count, _excess(in_order, count), _excess(alike, count)))
    return found


def _excess(pairs: np.ndarray, together: int) -> float:
    steps = pairs[: len(pairs) // together * together].reshape(-1, together)
    return float((steps.max(1) / steps.mean(1)).mean())
