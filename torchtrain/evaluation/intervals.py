"""How sure a mean is, and a difference: over samples, over pairs of samples, over seeds."""

import itertools
import math
from collections.abc import Sequence

import numpy as np

DRAWS = 2000
_ALL_SIGNS = 12
_MOST_LOSS = math.log(1e6)  # nats, whose perplexity has more digits than mean anything
MOST_EXPONENT = 709.0  # nats, whose perplexity float64 holds
_Z = 1.959963984540054  # of the normal distribution: 95 per cent lie within


def mean_interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of scores and its 95 per cent interval: Wilson's of scores in 0..1, Student's of any other.

    Wilson's is of scores 0 and 1; one between varies less, so that the interval is then too wide rather than too
    narrow. It has a width where all scores are equal, as it must: eight hits of eight do not prove a model perfect.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    if not 0 <= min(scores) <= max(scores) <= 1:
        return documents_interval(scores) or (mean, mean, mean)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return mean, max(0.0, centre - half), min(1.0, centre + half)


def interval_of(scores: Sequence[Sequence[float] | np.ndarray]) -> tuple[float, float, float]:
    """Return the mean over tasks and its 95 per cent interval: half widths of independent means added as squares.

    Args:
        scores: of each task the scores [samples].
    """
    each = [mean_interval(list(of)) for of in scores]
    mean = sum(of[0] for of in each) / len(each)
    low = mean - math.sqrt(sum((of[0] - of[1]) ** 2 for of in each)) / len(each)
    high = mean + math.sqrt(sum((of[2] - of[0]) ** 2 for of in each)) / len(each)
    return mean, low, high


def paired_interval(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """Return the mean over tasks of a - b, paired by sample, and its 95 per cent interval (bootstrap, seeded).

    Where the scores of all samples of a task differ alike the bootstrap gives it no width, and it has that of what no
    sample showed: a share p of samples that differ otherwise stays unseen in all n with a chance of (1 - p)^n. Half
    widths are added as squares.

    Args:
        a, b: of each task the scores [samples], 0 to 1, of the same samples.
    """
    random = np.random.default_rng(0)
    draws = np.zeros(DRAWS)
    for x, y in zip(a, b, strict=True):
        difference = x - y
        draws += difference[random.integers(0, len(difference), (DRAWS, len(difference)))].mean(-1)
    low, high = np.quantile(draws / len(a), [0.025, 0.975])
    mean = float(np.mean([np.mean(x - y) for x, y in zip(a, b, strict=True)]))
    alike = [(float((x - y)[0]), len(x)) for x, y in zip(a, b, strict=True) if are_equal(x - y)]
    each = [(of, 1 - 0.025 ** (1 / n)) for of, n in alike]
    below, above = ([unseen * (1 + sign * of) / len(a) for of, unseen in each] for sign in (1, -1))
    low, high = mean - math.hypot(mean - low, *below), mean + math.hypot(high - mean, *above)
    return mean, float(low), float(high)


def are_equal(numbers: Sequence[float] | np.ndarray) -> bool:
    """Whether numbers are one number but for rounding."""
    return bool(np.ptp(numbers) <= 1e-9 * max(1.0, float(np.max(np.abs(numbers)))))


def sign_flip(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> float:
    """Return how often the mean over tasks of a - b is as far from zero when each sample's sign is drawn: two-sided p.

    Of few samples that differ all signs are tried: five can show nothing (2 of 32).

    Args:
        a, b: of each task the scores [samples], the same samples.
    """
    parts = [(x - y) / len(x) for x, y in zip(a, b, strict=True)]
    each = np.concatenate(parts)
    each = each[each != 0]
    if not len(each):
        return 1.0
    if len(each) <= _ALL_SIGNS:
        signs = np.array(list(itertools.product((1, -1), repeat=len(each))))
        own = 0  # the signs as they are stand among them
    else:
        signs = np.random.default_rng(0).choice((1, -1), (5 * DRAWS, len(each)))
        own = 1
    as_far = int((np.abs(signs @ each) >= abs(each.sum()) * (1 - 1e-9)).sum())
    return (as_far + own) / (len(signs) + own)


def documents_interval(losses: Sequence[float] | np.ndarray) -> tuple[float, float, float] | None:
    """Return the mean of documents' losses, or of differences of them, and its 95 per cent interval, Student's; None of
    one document, or where all are equal, which says nothing of the next.

    Few documents, of losses without bounds: a bootstrap of eight takes too narrow an interval. A perplexity's is that
    of its loss, raised by e.

    Args:
        losses: [documents], nats.
    """
    if len(losses) < 2 or are_equal(losses):
        return None
    low, high = seeds_interval(list(losses), [0.0] * len(losses))
    return float(np.mean(losses)), low, high


def format_perplexity(loss: float) -> str:
    """Return e to a loss, in few digits where it means nothing."""
    if loss < _MOST_LOSS:
        return f"{math.exp(loss):.2f}"
    return f"{math.exp(loss):.1e}" if loss < MOST_EXPONENT else "inf"


def seeds_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Return Student's 95 per cent interval of the mean of a - b, paired in order.

    Args:
        a, b: of each seed a number; two seeds or more.
    """
    from scipy.stats import t

    each = np.asarray(a) - np.asarray(b)
    half = float(t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)))
    return float(each.mean()) - half, float(each.mean()) + half


def mcnemar(a: np.ndarray, b: np.ndarray) -> tuple[int, int, float]:
    """Return how many samples a alone gets right, how many b alone, and McNemar's exact p (two-sided, binomial).

    Args:
        a, b: scores [samples] of the same samples, each 0 or 1.
    """
    only_a, only_b = int(np.sum(a > b)), int(np.sum(b > a))
    from scipy.stats import binomtest

    differing = only_a + only_b
    return only_a, only_b, float(binomtest(only_a, differing).pvalue) if differing else 1.0
