"""RULER's own scores."""

import re
from collections.abc import Sequence

from torchtrain.evaluation.suite import Metric

_CONTROL = re.compile(r"[\x00-\x1f]")


def score(prediction: str, answers: Sequence[str], metric: Metric) -> float:
    """Return the share of answers that stand in a prediction (`all`), or whether one does (`any`), upper case or not.

    lm-eval averages over the answers of a question where RULER takes any.
    """
    text = _CONTROL.sub("\n", prediction.strip()).strip().lower()
    found = [answer.lower() in text for answer in answers]
    return float(any(found)) if metric == "any" else sum(found) / len(found)
