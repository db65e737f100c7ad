"""What the differences between an experiment's runs come to: contrasts of paired runs, each with an interval.

Runs of one seed read the same rows in the same order, and all models are measured on the same documents, so a contrast
is taken within a seed, and its mean over the documents is one number a seed. Its interval is Student's over these: it
says nothing of other documents. Of one seed alone it is over documents, which says nothing of other seeds: then there
is no verdict.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from torchtrain.experiment.measuring import Measurement
from torchtrain.experiment.spec import REFERENCE, PairedRun

CONFIDENCE = 0.95

# (arithmetic, variant) -> weight
Weights = Mapping[tuple[str, str], float]
Outcome = Callable[[Measurement], Sequence[float]]  # a number for each document
Verdict = Literal["more", "less", "less than the margin either way", "not settled", "one seed"]


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of runs, and what it answers."""

    name: str
    question: str
    weights: Weights


@dataclass(frozen=True)
class Estimate:
    """A contrast of one outcome, in nats a token; below 0 the loss is lower."""

    contrast: Contrast
    step: int
    seeds: tuple[int, ...]
    documents: int
    each: tuple[float, ...]  # of each seed
    mean: float
    low: float
    high: float

    @property
    def over(self) -> str:
        """What the interval is over."""
        return f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"{self.documents} documents, one seed"

    def verdict(self, margin: float) -> Verdict:
        """Say which side of +-margin the interval lies on; of one seed nothing."""
        if len(self.seeds) == 1:
            return "one seed"
        if self.low > margin:
            return "more"
        if self.high < -margin:
            return "less"
        return "less than the margin either way" if -margin <= self.low and self.high <= margin else "not settled"


def contrasts(arithmetics: Iterable[str], variants: Iterable[str]) -> list[Contrast]:
    """Return what an experiment of these can answer, in the order in which it is told."""
    arithmetics, variants = list(arithmetics), list(variants)
    rounded = [name for name in arithmetics if name != REFERENCE]
    others = [name for name in variants if name != "intra"] if "intra" in variants else []
    found = []
    for variant in others:
        said = {
            "intra_reset": "the same function: what chance alone gives",
            "anchor": "what the anchor does mathematically",
            "full": "what seeing other documents does",
        }[variant]
        found.append(
            Contrast(f"{variant} - intra, {REFERENCE}", said, {(REFERENCE, variant): 1, (REFERENCE, "intra"): -1})
        )
    for name in rounded:
        for variant in others:
            found.append(
                Contrast(f"{variant} - intra, {name}", "both together", {(name, variant): 1, (name, "intra"): -1})
            )
    for name in rounded:
        for variant in variants:
            found.append(
                Contrast(
                    f"{name} - {REFERENCE}, {variant}",
                    "what the arithmetic costs",
                    {(name, variant): 1, (REFERENCE, variant): -1},
                )
            )
        found += _over_variants(name, REFERENCE, variants, "what the arithmetic costs")
    for name in rounded:
        for variant in others:
            found.append(
                Contrast(
                    f"({variant} - intra), {name} - {REFERENCE}",
                    f"what precision adds to what {variant} does",
                    {(name, variant): 1, (name, "intra"): -1, (REFERENCE, variant): -1, (REFERENCE, "intra"): 1},
                )
            )
    if {"bfloat16", "rotation_float32"} <= set(rounded):
        for variant in variants:
            found.append(
                Contrast(
                    f"rotation_float32 - bfloat16, {variant}",
                    "what rotating in float32 gives back",
                    {("rotation_float32", variant): 1, ("bfloat16", variant): -1},
                )
            )
        found += _over_variants("rotation_float32", "bfloat16", variants, "what rotating in float32 gives back")
        for variant in others:
            found.append(
                Contrast(
                    f"({variant} - intra), bfloat16 - rotation_float32",
                    f"what the rotation's rounding adds to what {variant} does",
                    {
                        ("bfloat16", variant): 1,
                        ("bfloat16", "intra"): -1,
                        ("rotation_float32", variant): -1,
                        ("rotation_float32", "intra"): 1,
                    },
                )
            )
    kept = set(arithmetics)
    return [one for one in found if {name for name, _ in one.weights} <= kept]


def _over_variants(name: str, other: str, variants: Sequence[str], question: str) -> list[Contrast]:
    """Return what the choice of arithmetic makes of the mean over several variants; nothing of one."""
    if len(variants) < 2:
        return []
    share = 1 / len(variants)
    weights = {(of, variant): sign * share for variant in variants for of, sign in ((name, 1), (other, -1))}
    return [Contrast(f"{name} - {other}, mean of {len(variants)} masks", question, weights)]


def estimate(
    contrast: Contrast, measured: Mapping[tuple[PairedRun, int], Measurement], outcome: Outcome, step: int
) -> Estimate | None:
    """Take a contrast over the seeds of which all its runs are measured after a step; None if there is no such seed."""
    seeds = sorted({cell.seed for cell, _ in measured})
    by_seed: dict[int, np.ndarray] = {}
    for seed in seeds:
        keys = {(PairedRun(*of, seed), step): weight for of, weight in contrast.weights.items()}
        if all(key in measured for key in keys):
            by_seed[seed] = sum(
                (weight * np.asarray(outcome(measured[key])) for key, weight in keys.items()), start=np.zeros(1)
            )
    if not by_seed:
        return None
    each = np.array([values.mean() for values in by_seed.values()])
    samples = each if len(each) > 1 else next(iter(by_seed.values()))
    half = _half_width(samples)
    mean, documents = float(each.mean()), len(next(iter(by_seed.values())))
    return Estimate(contrast, step, tuple(by_seed), documents, tuple(each.tolist()), mean, mean - half, mean + half)


def _half_width(samples: np.ndarray) -> float:
    """Student's interval of a mean; infinite of a single sample."""
    if len(samples) < 2:
        return math.inf
    error = float(samples.std(ddof=1)) / math.sqrt(len(samples))
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, len(samples) - 1)) * error


def loss_from(position: int) -> Outcome:
    """Return the outcome: mean loss of the tokens at a position and beyond, by the bands that begin there."""

    def outcome(found: Measurement) -> Sequence[float]:
        kept = [number for number, (first, _) in enumerate(found.bands) if first >= position]
        widths = np.array([found.bands[number][1] - found.bands[number][0] for number in kept])
        return (np.array(found.losses)[:, kept] @ widths / widths.sum()).tolist()

    return outcome


def loss_in(number: int) -> Outcome:
    """Return the outcome: mean loss of the tokens of one band."""
    return lambda found: [losses[number] for losses in found.losses]


def second_time(number: int | None = None) -> Outcome:
    """Return the outcome: loss of a passage that stood in the row before, less its loss the first time. Below 0 the
    model copies.

    Args:
        number: of the distance; None: the mean over all.
    """

    def outcome(found: Measurement) -> Sequence[float]:
        copies = np.array(found.copies)
        again = copies.mean(axis=1) if number is None else copies[:, number]
        return (again - np.array(found.passages)).tolist()

    return outcome


def rounding_cost(found: Measurement) -> float | None:
    """Return what rounding the weights of a float32 model to bfloat16 adds to its loss, nats; None of another."""
    if found.rounded is None:
        return None
    widths = np.array([end - first for first, end in found.bands])
    return float(((np.array(found.rounded) - np.array(found.losses)) @ widths / widths.sum()).mean())
