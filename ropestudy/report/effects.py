"""Effects with their intervals: a mean, a quotient, an exponent over the texts, and how far other texts might move it.

Every interval is over texts, 95 per cent, paired where two numbers are of the same texts: it says what other texts like
these would give, not what another model would. Of quotients of KL and of differences of the loss it is Student's, of
the logarithms and of the differences: few texts make a bootstrap too narrow. Of all else, which has no such form, it
is a percentile bootstrap: texts are drawn anew with replacement, all that was measured on a text with it. Of a single
text nothing can be said: its interval is everything.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.special import stdtrit

from ropestudy.report.select import number

DRAWS = 4000
SEED = 20241120
LEVEL = 0.95


@dataclass(frozen=True)
class Effect:
    """A number and its interval."""

    value: float
    low: float
    high: float
    texts: int

    def __str__(self) -> str:
        return self.written()

    def written(self, digits: int = 3) -> str:
        """`0.0123 (0.01 to 0.02)`. digits: significant ones."""
        value, low, high = (number(x, digits) for x in (self.value, self.low, self.high))
        if math.isinf(self.low) and math.isinf(self.high) and not math.isinf(self.value):
            return f"{value} (one text)"
        return value if low == high == value else f"{value} ({low} to {high})"

    def within(self, low: float, high: float) -> bool | None:
        """Return whether it lies between two margins: None where the interval spans one of them."""
        if low <= self.low and self.high <= high:
            return True
        return False if self.high < low or self.low > high else None


def known(value: float) -> Effect:
    """Return a number that is of no text, and has no interval."""
    return Effect(value, value, value, 0)


def bootstrap(texts: int, statistic: Callable[[np.ndarray], np.ndarray]) -> Effect:
    """Return a statistic with its interval. statistic: of texts as their indices, [draws, texts] -> [draws]."""
    value = float(statistic(np.arange(texts)[None])[0])
    if texts < 2:
        return Effect(value, -math.inf, math.inf, texts)
    found = statistic(_draws(texts))
    found = np.sort(found[~np.isnan(found)])  # NaN: a draw that says nothing, such as one text over and over
    edge = int(len(found) * (1 - LEVEL) / 2)
    return Effect(value, float(found[edge]), float(found[-1 - edge]), texts)


@cache
def _draws(texts: int) -> np.ndarray:
    return np.random.default_rng(SEED).integers(0, texts, (DRAWS, texts))


def mean_of(values: Sequence[float]) -> Effect:
    """Return the mean over texts."""
    x = np.asarray(values, np.float64)
    return bootstrap(len(x), lambda chosen: x[chosen].mean(1))


def quotient_of(values: Sequence[float], others: Sequence[float]) -> Effect:
    """Return the quotient of two means over the same texts: infinite where only the second is 0, 1 where both are."""
    n = min(len(values), len(others))
    x, y = np.asarray(values[:n], np.float64), np.asarray(others[:n], np.float64)

    def quotient(chosen: np.ndarray) -> np.ndarray:
        above, under = x[chosen].mean(1), y[chosen].mean(1)
        return np.where(under == 0, np.where(above == 0, 1.0, np.inf), above / np.where(under == 0, 1.0, under))

    return bootstrap(n, quotient)


def student(values: Sequence[float], level: float = LEVEL) -> Effect:
    """Return the mean over texts with Student's interval."""
    x = np.asarray(values, np.float64)
    value = float(x.mean())
    if len(x) < 2:
        return Effect(value, -math.inf, math.inf, len(x))
    if not math.isfinite(value):
        return Effect(value, value, value, len(x))
    half = float(stdtrit(len(x) - 1, (1 + level) / 2)) * float(x.std(ddof=1)) / len(x) ** 0.5
    return Effect(value, value - half, value + half, len(x))


def _of_logarithms(logs: np.ndarray, level: float) -> Effect:
    found = student(logs.tolist(), level)
    if math.isinf(found.high) and math.isinf(found.low) and found.low < found.high:  # one text
        return Effect(math.exp(found.value), -math.inf, math.inf, found.texts)
    value, low, high = (math.exp(x) if x < 700 else math.inf for x in (found.value, found.low, found.high))
    return Effect(value, low, high, found.texts)


def fold_of(values: Sequence[float], others: Sequence[float], level: float = LEVEL) -> Effect:
    """Return the geometric mean of each text's quotient: how many times larger, where a few texts would rule a mean.

    1 where a text has 0 twice; nothing else may be 0.
    """
    n = min(len(values), len(others))
    x, y = np.asarray(values[:n], np.float64), np.asarray(others[:n], np.float64)
    both = (x == 0) & (y == 0)
    with np.errstate(divide="ignore"):
        logs = np.log(np.where(both, 1.0, x)) - np.log(np.where(both, 1.0, y))
    return _of_logarithms(logs, level)


def typical_of(values: Sequence[float]) -> Effect:
    """Return the geometric mean over texts; 0 where one is 0."""
    with np.errstate(divide="ignore"):
        logs = np.log(np.asarray(values, np.float64))
    return _of_logarithms(logs, LEVEL)


def difference_of(values: Sequence[float], others: Sequence[float]) -> Effect:
    """Return the difference of two means over the same texts."""
    n = min(len(values), len(others))
    return student((np.asarray(values[:n], np.float64) - np.asarray(others[:n], np.float64)).tolist())


def exponent_of(sizes: Sequence[float], values: Sequence[Sequence[float]]) -> Effect:
    """Return the exponent of a power law through means over texts, by least squares of the logarithms. values: at each
    size, of the same texts. 0 where there is nothing to fit.
    """
    y = np.asarray(values, np.float64)
    if not _fits(sizes, y):
        return known(0.0)
    return bootstrap(y.shape[1], lambda chosen: slope(sizes, y[:, chosen].mean(-1)))


def exponents_apart(sizes: Sequence[float], a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Effect:
    """Return the exponent of a less that of b, over the same texts."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not (_fits(sizes, x) and _fits(sizes, y)):
        return known(0.0)
    return bootstrap(x.shape[1], lambda on: slope(sizes, x[:, on].mean(-1)) - slope(sizes, y[:, on].mean(-1)))


def slope(sizes: Sequence[float], means: np.ndarray) -> np.ndarray:
    """Return the least squares slope of log(means) over log(sizes). means: [sizes, draws]."""
    x = np.log(np.asarray(sizes, np.float64))
    centred = x - x.mean()
    return centred @ np.log(means) / (centred**2).sum()


def _fits(sizes: Sequence[float], y: np.ndarray) -> bool:
    return len(set(sizes)) > 1 and bool((y > 0).all())


def common_share(gram: Sequence[Sequence[float]]) -> Effect:
    """Return which part of the mean square of vectors, one a text, is the same in all: 0 of noise, 1 of a constant.

    gram: mean products of every two of them. Products of two different texts alone are free of what is each one's own;
    a text that is drawn twice is therefore not paired with itself.
    """
    products = np.asarray(gram, np.float64)

    def share(chosen: np.ndarray) -> np.ndarray:
        other = chosen[:, :, None] != chosen[:, None]
        drawn = products[chosen[:, :, None], chosen[:, None]]
        pairs = other.sum((1, 2))
        common = (drawn * other).sum((1, 2)) / np.maximum(pairs, 1)
        own = products.diagonal()[chosen].mean(1)
        shares = np.where(own > 0, common / np.where(own > 0, own, 1.0), 0.0)
        return np.where(pairs > 0, shares, np.nan)

    return bootstrap(len(products), share)


def rms_of(gram: Sequence[Sequence[float]]) -> Effect:
    """Return the root mean square of such vectors."""
    squares = np.diag(np.asarray(gram, np.float64))
    return bootstrap(len(squares), lambda chosen: squares[chosen].mean(1) ** 0.5)
