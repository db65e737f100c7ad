"""RULER's own scores, and how sure a mean of few of them is."""

import math
import re
from collections.abc import Sequence

from torchtrain.evaluation.suite import Metric

_CONTROL = re.compile(r"[\x00-\x1f]")
_Z = 1.959963984540054  # of the normal distribution: 95 per cent lie within


def score(prediction: str, answers: Sequence[str], metric: Metric) -> float:
    """Return the share of answers that stand in a prediction (`all`), or whether one does (`any`), upper case or not.

    lm-eval averages over the answers of a question where RULER takes any.
    """
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if metric == "any" else sum(found) / len(found)


def mean_interval(scores: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of scores in 0..1 and its 95 per cent interval, Wilson's.

    Wilson's is of scores 0 and 1; one between varies less, so that the interval is then too wide rather than too
    narrow. It has a width where all scores are equal, as it must: eight hits of eight do not prove a model perfect.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return mean, max(0.0, centre - half), min(1.0, centre + half)
