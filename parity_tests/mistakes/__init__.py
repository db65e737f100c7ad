"""Mistakes that are made again and again, computed on purpose: what they give is held against what a candidate gives.

`parity check` and the gate both explain with these. A mistake is its words and a function that computes it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

Mistake = tuple[str, Callable[[], dict[str, Any]]]


def explanations(
    mistakes: Iterable[Mistake], ratio_of: Callable[[dict[str, Any]], float]
) -> Iterator[tuple[str, float]]:
    """Yield the words of every mistake that explains a candidate, and its ratio.

    mistakes: each is computed when its turn comes.
    ratio_of: error over allowance of the candidate if the arrays of a mistake were right; up to 1 explains it.
    """
    for words, compute in mistakes:
        ratio = ratio_of(compute())
        if ratio <= 1:
            yield words, ratio
