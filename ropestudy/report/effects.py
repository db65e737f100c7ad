"""Means and quotients over texts, each with an interval: which values other texts of this kind would give.

Intervals are Student's, 95 per cent, over texts. They are paired where two numbers are of the same texts. Quotients are
averaged as logarithms, so that a few texts cannot dominate. An interval says nothing about another model.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

LEVEL = 0.95


def format_number(value: float, digits: int = 3) -> str:
    """Return a number with this many significant digits: `0.0123`, `1.23e-5`, `1,230`."""
    if not math.isfinite(value):
        return str(value)
    value = float(f"{value:.{digits}g}") if abs(value) < 1000 else round(value)
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}" if abs(value) < 100 else f"{value:g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


@dataclass(frozen=True)
class Effect:
    """A number and its interval. With a single text the interval is infinite."""

    value: float
    low: float
    high: float

    def written(self, digits: int = 3) -> str:
        """Return `0.0123 (0.01 to 0.02)` with this many significant digits."""
        value, low, high = (format_number(x, digits) for x in (self.value, self.low, self.high))
        if math.isinf(self.low) and math.isinf(self.high) and not math.isinf(self.value):
            return f"{value} (one text)"
        return value if low == high == value else f"{value} ({low} to {high})"


def mean_of(values: Sequence[float], level: float = LEVEL) -> Effect:
    """Return the mean over texts."""
    x = np.asarray(values, np.float64)
    value = float(x.mean())
    if len(x) < 2:
        return Effect(value, -math.inf, math.inf)
    if not math.isfinite(value):
        return Effect(value, value, value)
    half = float(stdtrit(len(x) - 1, (1 + level) / 2)) * float(x.std(ddof=1)) / len(x) ** 0.5
    return Effect(value, value - half, value + half)


def difference_of(values: Sequence[float], others: Sequence[float]) -> Effect:
    """Return the mean difference of two numbers of the same texts."""
    return mean_of((np.asarray(values) - np.asarray(others)).tolist())


def typical_of(values: Sequence[float]) -> Effect:
    """Return the geometric mean over texts; 0 where one is 0."""
    with np.errstate(divide="ignore"):
        logs = mean_of(np.log(np.asarray(values, np.float64)).tolist())
    value, low, high = (math.exp(x) if x < 700 else math.inf for x in (logs.value, logs.low, logs.high))
    return Effect(value, -math.inf if math.isinf(logs.low) and logs.value > -math.inf else low, high)


def fold_of(values: Sequence[float], others: Sequence[float]) -> Effect:
    """Return the geometric mean of each text's quotient; a text that has 0 twice counts as 1."""
    x, y = np.asarray(values, np.float64), np.asarray(others, np.float64)
    both = (x == 0) & (y == 0)
    with np.errstate(divide="ignore"):
        return typical_of((np.where(both, 1.0, x) / np.where(both, 1.0, y)).tolist())


def exponent_of(sizes: Sequence[float], values: Sequence[Sequence[float]]) -> Effect:
    """Return the exponent of a power law, fitted to the logarithms of each text by itself. values: [sizes][texts]."""
    x = np.log(np.asarray(sizes, np.float64))
    centred = x - x.mean()
    return mean_of((centred @ np.log(np.asarray(values, np.float64)) / (centred**2).sum()).tolist())
