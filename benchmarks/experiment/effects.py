"""The effects in an experiment: contrasts of paired runs, each with an interval over seeds and rows.

Runs of one seed begin from the same base and read the same documents in the same order. All are measured on the same
rows. So a contrast is a table with a number for each seed and row. Seeds and rows are both drawn from many, so the
variance of the table's mean is taken as that of the mean over seeds plus that of the mean over rows, each as if the
other were fixed; Student's degrees of freedom are Satterthwaite's. Each seed has a base of its own, so an interval over
seeds is one over bases. That counts the chance of single cells twice: intervals are a little too wide.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from benchmarks.experiment.recall import Measurement
from benchmarks.experiment.spec import Contrast, Run

POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A contrast. With one seed its interval is infinite."""

    mean: float
    error: float  # standard error
    freedom: float  # Student's degrees
    seeds: int
    level: float

    @property
    def half(self) -> float:
        """Half of the interval."""
        if self.seeds < 2 or self.error == 0:
            return math.inf if self.seeds < 2 else 0.0
        return float(stats.t.ppf((1 + self.level) / 2, self.freedom)) * self.error

    @property
    def p(self) -> float:
        """The odds of a mean this far from 0 if there were no effect, on both sides."""
        if self.seeds < 2 or self.error == 0:
            return 1.0 if self.mean == 0 or self.seeds < 2 else 0.0
        return float(2 * stats.t.sf(abs(self.mean) / self.error, self.freedom))

    def __str__(self) -> str:
        return f"{self.mean:+.5f} [{self.mean - self.half:+.5f}, {self.mean + self.half:+.5f}]"


def table_of(
    contrast: Contrast, measured: Mapping[Run, Measurement], opening: str = "bos", distance: int | None = None
) -> np.ndarray:
    """Return a contrast of the answers' log-probability, [seeds, rows], of the seeds whose runs are all measured.

    opening: bos | no_bos: how the rows open.
    distance: by its number; default: the mean over all.
    """
    each = []
    for seed in sorted({run.seed for run in measured}):
        runs = {Run(*cell, seed): weight for cell, weight in contrast.weights.items()}
        if all(run in measured for run in runs):
            each.append(sum(weight * log_probability(measured[run], opening, distance) for run, weight in runs.items()))
    return np.array(each)


def log_probability(measured: Measurement, opening: str = "bos", distance: int | None = None) -> np.ndarray:
    """Return the log-probability of a run's answers by row, [rows]."""
    nats = -np.array(getattr(measured, opening).nats)
    return nats.mean(axis=0) if distance is None else nats[distance]


def estimate(table: np.ndarray, level: float) -> Estimate | None:
    """Return the mean of a table [seeds, rows] with its interval; None without seeds."""
    if not len(table):
        return None
    seeds, rows = table.shape
    if seeds < 2:
        return Estimate(float(table.mean()), math.inf, 1.0, seeds, level)
    by_seed = float(table.mean(axis=1).var(ddof=1)) / seeds
    by_row = float(table.mean(axis=0).var(ddof=1)) / rows
    variance = by_seed + by_row
    freedom = variance**2 / (by_seed**2 / (seeds - 1) + by_row**2 / (rows - 1)) if variance else 1.0
    return Estimate(float(table.mean()), variance**0.5, freedom, seeds, level)


def correct(each: Sequence[float]) -> list[float]:
    """Return p-values by Holm's correction over all of them."""
    corrected, least = [0.0] * len(each), 0.0
    for rank, number in enumerate(sorted(range(len(each)), key=lambda number: each[number])):
        least = max(least, min(1.0, (len(each) - rank) * each[number]))
        corrected[number] = least
    return corrected


def read(contrast: Contrast, effect: Estimate | None, corrected: float) -> str:
    """Return what an effect means: its side of 0 if it holds after the correction."""
    if effect is None or effect.seeds < 2:
        return "not yet run"
    if corrected > 1 - effect.level:
        return contrast.neither
    return contrast.above if effect.mean > 0 else contrast.below


def detectable(effect: Estimate) -> float:
    """Return the effect that such seeds and rows detect with 80% power, before any correction."""
    if effect.seeds < 2:
        return math.inf
    needed = stats.t.ppf((1 + effect.level) / 2, effect.freedom) + stats.t.ppf(POWER, effect.freedom)
    return float(needed) * effect.error
