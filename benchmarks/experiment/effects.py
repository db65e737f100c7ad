"""The effects in an experiment: contrasts of paired runs, each with an interval, and how each is read.

Runs of one seed begin from the same base and read the same rows in the same order. All are measured on the same rows.
So a contrast is taken within a seed, and its interval is Student's over seeds. It says nothing about other bases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.experiment.recall import Measurement
from benchmarks.experiment.spec import Run
from ropestudy.report.effects import mean_of

CONFIDENCE, POWER = 0.95, 0.8
MARGIN = 0.03  # nats: less counts as no effect
NOT_RUN = "not yet run"

Outcome = Callable[[Measurement], float]


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of runs of one seed."""

    name: str
    weights: Mapping[tuple[str, str], int]  # of (arithmetic, variant)


@dataclass(frozen=True)
class Estimate:
    """A contrast over seeds. With one seed the interval is infinite."""

    name: str
    each: tuple[float, ...]  # of each seed
    mean: float
    low: float
    high: float

    @property
    def deviation(self) -> float:
        """Standard deviation over seeds; infinite with one seed."""
        return float(np.std(self.each, ddof=1)) if len(self.each) > 1 else math.inf

    def __str__(self) -> str:
        if not any(self.each):
            return f"0 in all of {len(self.each)} seeds"
        return f"{self.mean:+.4f} ({self.low:+.4f} to {self.high:+.4f}, {len(self.each)} seeds)"


def _difference(first: str, second: str, arithmetic: str) -> dict[tuple[str, str], int]:
    return {(arithmetic, first): 1, (arithmetic, second): -1}


RELATIVITY = Contrast(
    "(intra_reset - intra), bf16_after - bf16_before",
    _difference("intra_reset", "intra", "bf16_after") | _difference("intra", "intra_reset", "bf16_before"),
)
SINK = Contrast("anchor - intra, exact", _difference("anchor", "intra", "exact"))
CONTROL = Contrast("bits1_after - exact, intra", {("bits1_after", "intra"): 1, ("exact", "intra"): -1})
PRECISION = Contrast(
    "(anchor - intra), bf16_after - exact",
    _difference("anchor", "intra", "bf16_after") | _difference("intra", "anchor", "exact"),
)
OTHERS = (
    Contrast("anchor - full, exact", _difference("anchor", "full", "exact")),
    Contrast("bf16_after - bf16_before, intra", {("bf16_after", "intra"): 1, ("bf16_before", "intra"): -1}),
)


def recall_at(number: int | None = None) -> Outcome:
    """Return a function of a measurement: recall at a distance (None: at all), averaged over the last checkpoints."""
    return lambda measured: _at(measured.recall, number)


def log_probability_at(number: int | None = None) -> Outcome:
    """Return the same of the log-probability of the answers, which unlike recall has no ceiling at 1."""
    return lambda measured: -_at(measured.nats, number)


def _at(values: Sequence[Sequence[float]], number: int | None) -> float:
    by_distance = np.mean(values, axis=0)
    return float(by_distance.mean() if number is None else by_distance[number])


def estimate(contrast: Contrast, measured: Mapping[Run, Measurement], outcome: Outcome) -> Estimate | None:
    """Return a contrast over the seeds whose runs are all measured; None if there is no such seed."""
    each = []
    for seed in sorted({run.seed for run in measured}):
        runs = {Run(*of, seed): weight for of, weight in contrast.weights.items()}
        if all(run in measured for run in runs):
            each.append(sum(weight * outcome(measured[run]) for run, weight in runs.items()))
    return summarise(contrast.name, each) if each else None


def summarise(name: str, each: list[float]) -> Estimate:
    """Return the mean of one number for each seed, and Student's interval."""
    effect = mean_of(each)
    return Estimate(name, tuple(each), effect.value, effect.low, effect.high)


def seeds_for_power(deviation: float, effect: float, most: int = 10_000) -> int:
    """Return how many seeds detect an effect with 80% power, if paired differences have this standard deviation."""
    for seeds in range(3, most):
        needed = stats.t.ppf((1 + CONFIDENCE) / 2, seeds - 1) + stats.t.ppf(POWER, seeds - 1)
        if needed * deviation / math.sqrt(seeds) <= effect:
            return seeds
    return most


def read(effect: Estimate | None, above: str, below: str, neither: str) -> str:
    """Return what an effect means if its interval is above 0, below 0, or neither."""
    if effect is None or len(effect.each) < 2:
        return NOT_RUN
    return above if effect.low > 0 else below if effect.high < 0 else neither


def read_relativity(effect: Estimate | None, control: Estimate | None) -> str:
    """Read the primary contrast as was agreed before the runs."""
    if effect is None or control is None or len(effect.each) < 2:
        return NOT_RUN
    if not control.high < 0:
        return "inconclusive: the positive control was missed"
    if effect.low >= -MARGIN and effect.high <= MARGIN and not effect.low > 0:
        return "broken relativity as the cause is refuted at this size"
    missed = "not settled: the interval is wider than the margin"
    return read(effect, "broken relativity matters", missed, missed)
