"""A few measurements of one thing: their median, the least and the most."""

import math
import statistics
from collections.abc import Sequence

Spread = dict[str, float]


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def noise_of(spread: Spread) -> float:
    """Return how far a turn was from the median at most, as the logarithm of a ratio."""
    return max(math.log(spread["most"] / spread["median"]), math.log(spread["median"] / spread["least"]))


def show(spread: Spread, digits: int = 3) -> str:
    """Return `median (least to most)`."""
    middle, low, high = (f"{spread[name]:.{digits}g}" for name in ("median", "least", "most"))
    return f"{middle} ({low} to {high})"
