"""The one rule by which a number is judged, after FlashAttention's own tests.

With truth computed in float64 and a reference that makes the candidate's roundings and no others,

    error(candidate, truth) <= 2 x error(reference, truth) + one rounding of the truth's own size

where error is the root mean square of the difference over the array, and one rounding is the unit roundoff of the
candidate's dtype times the root mean square of the truth. Integers, masks, plans and positions compare exactly. What
a model computes is judged by no other tolerance in this repository, and this one is never loosened.

FlashAttention's tests take the largest difference instead, and a factor of 3 for gradients. A correct float32 gradient
exceeds a factor of 2 in its worst element in one array of a hundred. Its root mean square stays within a factor of 1.5
(docs/LOG.md), so the mean square tells a wrong kernel from chance. The mean square may miss an error in one token of
many (a leak, a mask off by one). For these errors, tests check that gradients are exactly zero.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

# Half a unit in the last place, relative: 2 ** -(explicit mantissa bits + 1).
UNIT_ROUNDOFF = {
    **{"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8},
    **{"float8_e4m3": 2.0**-4, "float8_e5m2": 2.0**-3},
}
UNLIKELY = 8.0  # standard deviations of independent roundings that a part of an array is allowed
HALF = ("bfloat16", "float16")
LEAST = 16  # values in a part: the mean square of fewer says too little
_AT_ONCE = 2**16  # elements widened to float64 at a time: what stays in a cache is twice as fast as 2**22


class Judged:
    """Has an error and what is allowed, both root mean squares in the array's own units, and perhaps a worst part."""

    if TYPE_CHECKING:  # each subclass declares its fields, in its own order
        error: float
        allowance: float

    @property
    def passed(self) -> bool:
        """Whether the rule holds, also for the worst part. A NaN or a stray infinity never passes."""
        part = getattr(self, "part", None)
        return self.error <= self.allowance < float("inf") and (part is None or part.passed)

    @property
    def ratio(self) -> float:
        """Error over allowance, of the whole or of its worst part: up to 1 passes. 0 where the error is 0."""
        part = getattr(self, "part", None)
        return max(self.whole, 0.0 if part is None else part.ratio)

    @property
    def whole(self) -> float:
        """Error over allowance of the whole; infinite where only the allowance is 0."""
        if self.error == 0:
            return 0.0
        return self.error / self.allowance if self.allowance > 0 else float("inf")


@dataclass(frozen=True)
class PartVerdict(Judged):
    """What came out for a part of an array."""

    name: str  # `token 12 of row 0`, `head 3`, `the mean`, `the scale`, `the angle of pair 7`
    error: float
    allowance: float


@dataclass(frozen=True)
class Verdict(Judged):
    """What came out for one array."""

    error: float  # of the candidate
    allowance: float
    worst: tuple[int, ...]  # where the candidate errs most
    part: PartVerdict | None = None  # the part with the largest ratio, where parts were judged
    reference: float = 0.0  # the error of the reference
    size: float = 0.0  # of the truth, where it is finite

    def __str__(self) -> str:
        word = "within" if self.passed else "BREAKS"
        part = f", worst part {self.part.name}" if self.part else ""
        return (
            f"error {self.error:.3e} {word} allowance {self.allowance:.3e} (ratio {self.ratio:.3g}) at "
            f"{self.worst}{part}"
        )


def judge(
    candidate: ArrayLike,
    truth: ArrayLike,
    reference: ArrayLike,
    dtype: str,
    axes: str | None = None,
    *,
    cancels: bool = False,
    inherits: bool = False,
    rotated: int = 0,
    likely_error: float = 0.0,
) -> Verdict:
    """Judge `candidate` against `truth`, allowing what `reference` errs.

    candidate: the array under test, any float dtype, finite except where the truth is infinite too.
    truth: the same quantity from float64 arithmetic on the same inputs.
    reference: the same quantity with the candidate's roundings (the oracle under the candidate's preset).
    dtype: the dtype the candidate computes in: `float64`, `float32`, `float16` or `bfloat16`.
    axes: names the axes, so that parts of an array of half precision, and of one in float32 that `inherits`, are judged
        too: `BTHD`, `BTM`, `BHT`, `BT` (tokens T in rows B, heads H) or `OI` (a weight). In the gradients of
        single functions in float32, right code was seen to err 1.3 times what a token would be allowed.
    cancels: the array is a difference of larger numbers, as gradients are, so that a token is allowed what the whole
        array is.
    inherits: the array has errors of the layers before it. A token is allowed what the whole array is, and its values
        count as one, because one error of an earlier layer moves all of them.
    rotated: how many dimensions of a head, from the first, come out of RoPE: in half precision the angle of each pair
        is judged; in float32 right code breaks it with scaled frequencies (12 of the gate's 137 cases).
    likely_error: what a reference may well err, where that is known and the array has too few values to show it
        (`likely_error_of_mean`).
    Raises ValueError: shapes differ, the arrays are empty, or the dtype has no unit roundoff here.
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
        mine, true, other = (x[start : start + _AT_ONCE].astype(np.float64) for x in flat)
        difference = _difference(mine, true)
        squares += [_sum_of_squares(x) for x in (difference, _difference(other, true), true[np.isfinite(true)])]
        if difference.max() > largest:
            largest, worst = float(difference.max()), start + int(difference.argmax())
    error, reference_error, size = (float(x) for x in np.sqrt(squares / truth.size))
    allowance = 2 * max(reference_error, likely_error) + UNIT_ROUNDOFF[dtype] * size
    part = None
    in_parts = dtype in HALF or (dtype == "float32" and inherits)
    if axes is not None and in_parts and error and np.isfinite(allowance) and np.isfinite(error):
        parts = _judge_parts(candidate, truth, reference, dtype, axes, allowance, cancels or inherits, inherits)
        if rotated and dtype in HALF:
            parts += _judge_angles(candidate[..., :rotated], truth[..., :rotated], reference[..., :rotated], allowance)
        part = max(parts, key=lambda part: part.ratio)
    index = tuple(int(i) for i in np.unravel_index(worst, truth.shape))
    return Verdict(error, allowance, index, part, reference_error, size)


def likely_error_of_mean(truth_n: ArrayLike, reference_n: ArrayLike, count: int) -> float:
    """Return what a mean of `count` values may well err, from the errors of n such values of the reference.

    The error of a mean is a single number. By luck it is a tenth of what another order of summation gives, and twice
    such an error allows nothing. The errors of many values have no such luck: if they are independent, the standard
    deviation of the mean is their root mean square over the root of `count`. Two of it are returned, so that the rule
    allows four, as it does in `_judge_parts`. A bias that all values share is not in it, and shows. n may be more than
    `count`: the error of a mean of few values is estimated from more values of the same kind.
    """
    errors_n = _difference(np.asarray(reference_n, np.float64), np.asarray(truth_n, np.float64))
    return 2 * float(np.sqrt(_sum_of_squares(errors_n) / errors_n.size / count))


def likely_error_of_norms(truth_SP: ArrayLike, reference_SP: ArrayLike) -> float:
    """Return what the global norms of S gradients may well err, from the norms of the gradients of P weights.

    A few norms are as lucky as one mean. The error of a global norm is the sum over weights of (norm of the weight) x
    (its error) / (global norm). If the weights' errors are independent, its variance is the sum of the squares. Two
    standard deviations are returned, their root mean square over the steps. A step without finite norms is left out.
    """
    truth_SP, reference_SP = (np.asarray(norms, np.float64) for norms in (truth_SP, reference_SP))
    finite_S = np.isfinite(truth_SP).all(1)
    truth_SP, reference_SP = truth_SP[finite_S], reference_SP[finite_S]
    parts_SP = truth_SP * (reference_SP - truth_SP) / np.linalg.norm(truth_SP, axis=1, keepdims=True)
    return 2 * float(np.sqrt(_sum_of_squares(parts_SP) / max(1, len(parts_SP))))


def _judge_parts(
    candidate: np.ndarray,
    truth: np.ndarray,
    reference: np.ndarray,
    dtype: str,
    axes: str,
    allowance: float,
    cancels: bool,
    inherits: bool,
) -> list[PartVerdict]:
    """Each token, each head, each row of a weight, the mean and the scale.

    A part that holds nothing but 0 is no rounding, so it is allowed its own errors alone: what was left out of a head
    far smaller than the others shows.
    """
    per_row = truth.shape[axes.index("T")] if "T" in axes else 0
    candidate_NHD, truth_NHD, reference_NHD = (_by_token(x, axes) for x in (candidate, truth, reference))
    N, H, D = truth_NHD.shape
    sums = np.zeros((9, N, H))
    for start in range(0, N, step := max(1, _AT_ONCE // (H * D))):
        at = slice(start, start + step)
        mine, true = candidate_NHD[at].astype(np.float64), truth_NHD[at].astype(np.float64)
        errs, allowed = (_signed(x, true) for x in (mine, reference_NHD[at].astype(np.float64)))
        true = np.where(np.isfinite(true), true, 0.0)
        squared = true * true
        products = (errs * errs, allowed * allowed, squared, errs * true, allowed * true, errs, allowed)
        products += (squared * squared, mine * mine)
        sums[:, at] = [x.sum(-1) for x in products]

    parts: list[PartVerdict] = []
    for axis, count in ((1, H * D), (0, N * D)):
        squares = sums[:3].sum(axis + 1)
        if count < LEAST or squares.shape[1] == 1:
            continue
        error, own, size = np.sqrt(squares / count)
        # Where few values are much larger than the others, only their errors count. Of a normal distribution this is
        # the number of values; of one value among zeros it is 3.
        independent = 3 * squares[2] ** 2 / np.maximum(sums[7].sum(axis), 1e-300)
        chance = 1 + UNLIKELY / np.sqrt(2 * np.clip(independent, 1, 1 if inherits else count))
        least = 2 * own + UNIT_ROUNDOFF[dtype] * size
        allowed = chance * np.maximum(least, allowance if cancels else 0.0)
        np.copyto(allowed, least, where=sums[8].sum(axis) == 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            i = int(np.where(error > 0, error / allowed, 0.0).argmax())
        token = f"token {i % per_row} of row {i // per_row}" if per_row else f"row {i}"
        name = f"head {i}" if axis == 0 else token
        parts.append(PartVerdict(name, float(error[i]), float(allowed[i])))

    # The sum of independent errors along a direction of length 1 is as large as one of them. A vector of D values
    # counts as one, because its roundings are not independent, and errs as its own size lets it. The allowance is about
    # 4 standard deviations.
    total = sums.sum((1, 2))
    own_NH = 2 * np.sqrt(sums[1] / D) + UNIT_ROUNDOFF[dtype] * np.sqrt(sums[2] / D)
    square_NH = D * np.square(np.maximum(own_NH, allowance))
    for name, length, along, own, square in (
        ("the mean", np.sqrt(truth.size), total[5], total[6], square_NH.mean()),
        ("the scale", np.sqrt(total[2]), total[3], total[4], (square_NH * sums[2]).sum() / max(total[2], 1e-300)),
    ):
        if length > 0:
            allowed = 2 * abs(own) / length + UNLIKELY / 4 * np.sqrt(square)
            parts.append(PartVerdict(name, float(abs(along) / length), float(allowed)))
    return parts


def _by_token(x: np.ndarray, axes: str) -> np.ndarray:
    """Tokens (or rows of a weight), heads (or 1), and what is left of the axes (or 1)."""
    if axes == "BHT":
        x = x.swapaxes(1, 2)[..., None]
    elif axes in ("BTM", "OI"):
        x = x[..., None, :]
    elif axes == "BT":
        x = x[..., None, None]
    return x.reshape(-1, *x.shape[-2:])


def _judge_angles(
    candidate: np.ndarray, truth: np.ndarray, reference: np.ndarray, allowance: float
) -> list[PartVerdict]:
    """The angle that RoPE turned each pair too far, [B, T, H, D]: on average, and in proportion to the token's index.

    All heads share a token's angle, so its errors are less independent than others: they are allowed more.
    """
    true = truth.astype(np.float64)
    first, second = np.split(true, 2, axis=-1)
    quarter = np.concatenate([-second, first], axis=-1)  # turned by a quarter, which is where a small angle moves it
    index = np.arange(1, true.shape[1] + 1, dtype=np.float64).reshape(1, -1, 1, 1)
    parts: list[PartVerdict] = []
    for along, name in ((quarter, "the angle"), (quarter * index, "the frequency")):
        length, error, own = (
            _by_pair(along * x)
            for x in (along, candidate.astype(np.float64) - true, reference.astype(np.float64) - true)
        )
        for i in np.flatnonzero(length):
            scale = float(np.sqrt(length[i]))
            allowed = 2 * abs(float(own[i])) / scale + UNLIKELY * allowance
            parts.append(PartVerdict(f"{name} of pair {i}", abs(float(error[i])) / scale, allowed))
    return parts


def _by_pair(x_BTHD: np.ndarray) -> np.ndarray:
    """The sum over rows, tokens and heads, the two halves of a head together: [D / 2]."""
    return np.asarray(x_BTHD.sum((0, 1, 2)).reshape(2, -1).sum(0))


def _signed(values: np.ndarray, truth: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return np.where(values == truth, 0.0, values - truth)


def _sum_of_squares(x: np.ndarray) -> float:
    return float(np.sum(np.square(x)))


def _difference(values: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Absolute difference; 0 where both are the same infinity, infinite where one is NaN or only one is infinite."""
    with np.errstate(invalid="ignore"):
        difference = np.abs(values - truth)
    difference = np.where(np.isnan(difference), np.inf, difference)
    return np.where(values == truth, 0.0, difference)
