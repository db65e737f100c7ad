"""95 per cent intervals of a mean (over samples, documents or seeds), and of a difference between paired samples."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

DRAWS = 2000
_MOST_LOSS = math.log(1e6)  # nats: a larger perplexity is written with two digits
MOST_EXPONENT = 709.0  # nats: the largest loss whose perplexity float64 holds
_Z = 1.959963984540054  # 95 per cent of the normal distribution lie within
Scores = Sequence[Sequence[float] | np.ndarray]  # of each task the scores [samples]
Interval = tuple[float, float, float]  # mean, low, high


def mean_interval(scores: Sequence[float] | np.ndarray) -> Interval:
    """Return a mean with Wilson's interval if all scores lie in 0..1, else with Student's. Wilson's has a width even if
    all are equal; for scores between 0 and 1 it is too wide, never too narrow.
    """
    n, mean = len(scores), float(np.mean(scores))
    if not 0 <= min(scores) <= max(scores) <= 1:
        return student_interval(scores) or (mean, mean, mean)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return mean, max(0.0, centre - half), min(1.0, centre + half)


def interval_of(scores: Scores) -> Interval:
    """Return the mean over tasks with its interval: half widths of independent means are added as squares."""
    each = [mean_interval(of) for of in scores]
    mean = sum(of[0] for of in each) / len(each)
    below = math.hypot(*(of[0] - of[1] for of in each)) / len(each)
    above = math.hypot(*(of[2] - of[0] for of in each)) / len(each)
    return mean, mean - below, mean + above


def student_interval(numbers: Sequence[float] | np.ndarray) -> Interval | None:
    """Return a mean with Student's interval; None for one number, or for equal ones, which do not tell of the next."""
    if len(numbers) < 2 or are_equal(numbers):
        return None
    low, high = stats.ttest_1samp(numbers, 0).confidence_interval()
    return float(np.mean(numbers)), float(low), float(high)


def are_equal(numbers: Sequence[float] | np.ndarray) -> bool:
    """Return whether numbers are equal but for rounding."""
    return bool(np.ptp(numbers) <= 1e-9 * max(1.0, float(np.max(np.abs(numbers)))))


def paired_interval(a: Scores, b: Scores) -> Interval:
    """Return the mean over tasks of a - b, paired by sample, with its interval by bootstrap.

    Where all samples of a task differ alike, the bootstrap gives no width. The task then gets the width of what its n
    samples may have missed: a share p of other samples stays unseen with a chance of (1 - p)^n. Half widths are added
    as squares. Scores are 0 to 1.
    """
    random, draws, unseen = np.random.default_rng(0), np.zeros(DRAWS), []
    differences = [np.asarray(x) - np.asarray(y) for x, y in zip(a, b, strict=True)]
    for each in differences:
        draws += each[random.integers(0, len(each), (DRAWS, len(each)))].mean(-1)
        if are_equal(each):
            share = 1 - 0.025 ** (1 / len(each))
            unseen.append((share * (1 + each[0]) / len(a), share * (1 - each[0]) / len(a)))
    low, high = np.quantile(draws / len(a), [0.025, 0.975])
    mean = float(np.mean([each.mean() for each in differences]))
    low = mean - math.hypot(mean - low, *(below for below, _ in unseen))
    return mean, low, mean + math.hypot(high - mean, *(above for _, above in unseen))


def sign_flip(a: Scores, b: Scores) -> float:
    """Return the two-sided p of the mean over tasks of a - b, when the sign of each sample's difference is drawn.

    All signs are tried where few samples differ; five can show nothing (2 of 32).
    """
    each = np.concatenate([(np.asarray(x) - np.asarray(y)) / len(x) for x, y in zip(a, b, strict=True)])
    each = each[each != 0]
    if len(each) < 2:
        return 1.0
    rng = np.random.default_rng(0)
    found = stats.permutation_test((each,), np.sum, permutation_type="samples", n_resamples=5 * DRAWS, rng=rng)
    return float(found.pvalue)


def format_perplexity(loss: float) -> str:
    """Return e to a loss, with two digits where more mean nothing."""
    if loss < _MOST_LOSS:
        return f"{math.exp(loss):.2f}"
    return f"{math.exp(loss):.1e}" if loss < MOST_EXPONENT else "inf"
