"""The one rule by which a number is judged, after FlashAttention's own tests.

With truth computed in float64 and a reference that makes the candidate's roundings and no others,

    error(candidate, truth) <= 2 x error(reference, truth) + one rounding of the truth's own size

where error is the root mean square of the difference over the array, and one rounding is the unit roundoff of the
candidate's dtype times the root mean square of the truth. Integers, masks, plans and positions compare exactly. What
a model computes is judged by no other tolerance in this repository, and this one is never loosened.

FlashAttention's tests take the largest difference instead, and 3 where a gradient is concerned. Two correct float32
implementations of one gradient differ by more than 2 in their single worst element in one array of a hundred, by no
more than 1.5 in the mean square (docs/LOG.md), so the mean square tells a wrong kernel from an unlucky one. What only
one token in many shows (a leak, a mask off by one) is not left to it: gradients that are exactly zero prove isolation.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

# Half a unit in the last place, relative: 2 ** -(explicit mantissa bits + 1).
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_AT_ONCE = 2**22  # elements widened to float64 at a time: the logits of a real model fill gigabytes


class Judged:
    """Has an error and what is allowed, both root mean squares in the array's own units."""

    if TYPE_CHECKING:  # whoever inherits declares its fields, in its own order
        error: float
        allowance: float

    @property
    def passed(self) -> bool:
        """Whether the rule holds. A NaN or a stray infinity never passes, the reference's own least of all."""
        return self.error <= self.allowance < float("inf")

    @property
    def ratio(self) -> float:
        """Error over allowance: up to 1 passes. 0 where both are 0, infinite where only the allowance is."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowance if self.allowance > 0 else float("inf")


@dataclass(frozen=True)
class Verdict(Judged):
    """What came out for one array."""

    error: float  # of the candidate
    allowance: float
    worst: tuple[int, ...]  # where the candidate errs most

    def __str__(self) -> str:
        word = "within" if self.passed else "BREAKS"
        return f"error {self.error:.3e} {word} allowance {self.allowance:.3e} (ratio {self.ratio:.3g}) at {self.worst}"


def judge(candidate: ArrayLike, truth: ArrayLike, reference: ArrayLike, dtype: str) -> Verdict:
    """Judge `candidate` against `truth`, allowing what `reference` errs.

    Args:
        candidate: the array under test, any float dtype, finite except where the truth is infinite too.
        truth: the same quantity from float64 arithmetic on the same inputs.
        reference: the same quantity with the candidate's roundings (the oracle under the candidate's preset).
        dtype: the dtype the candidate computes in: `float64`, `float32`, `float16` or `bfloat16`.

    Raises:
        ValueError: shapes differ, the arrays are empty, or the dtype has no unit roundoff here.
    """
    if dtype not in UNIT_ROUNDOFF:
        raise ValueError(f"dtype {dtype!r}: no unit roundoff; known: {', '.join(UNIT_ROUNDOFF)}")
    candidate, truth, reference = (np.asarray(x) for x in (candidate, truth, reference))
    if not candidate.shape == truth.shape == reference.shape:
        raise ValueError(
            f"shapes differ: candidate {candidate.shape}, truth {truth.shape}, reference {reference.shape}"
        )
    if truth.size == 0:
        raise ValueError("nothing to judge: the arrays are empty")
    squares = np.zeros(3)  # sums of squares: the candidate's error, the reference's, the truth itself
    largest, worst = -1.0, 0
    flat = [x.reshape(-1) for x in (candidate, truth, reference)]
    for start in range(0, truth.size, _AT_ONCE):
        mine, true, theirs = (x[start : start + _AT_ONCE].astype(np.float64) for x in flat)
        difference = _difference(mine, true)
        squares += [_sum_of_squares(x) for x in (difference, _difference(theirs, true), true[np.isfinite(true)])]
        if difference.max() > largest:
            largest, worst = float(difference.max()), start + int(difference.argmax())
    error, reference_error, size = (float(x) for x in np.sqrt(squares / truth.size))
    return Verdict(
        error=error,
        allowance=2 * reference_error + UNIT_ROUNDOFF[dtype] * size,
        worst=tuple(int(i) for i in np.unravel_index(worst, truth.shape)),
    )


def _sum_of_squares(x: np.ndarray) -> float:
    return float(np.sum(np.square(x)))


def _difference(values: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Absolute difference; 0 where both are the same infinity, infinite where one is NaN or only one is infinite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(values - truth)
    difference = np.where(np.isnan(difference), np.inf, difference)
    return np.where(values == truth, 0.0, difference)
