"""Contrasts of paired runs: their arithmetic, their intervals, and how they are read."""

import pytest
from scipy import stats

from benchmarks.experiment.effects import (
    CONTROL,
    RELATIVITY,
    estimate,
    read,
    read_relativity,
    recall_at,
    seeds_for_power,
    summarise,
)
from benchmarks.experiment.recall import Measurement
from benchmarks.experiment.spec import Run


def measurement(recall: float) -> Measurement:
    """Of two checkpoints and two distances, whose mean is `recall`; the loss is .1 more."""
    both = [[recall - 0.05, recall + 0.15], [recall - 0.15, recall + 0.05]]
    return Measurement(recall=both, nats=[[x + 0.1 for x in row] for row in both], losses=[1.0], seconds=1.0)


def test_a_contrast_is_taken_within_seeds_that_have_all_its_runs():
    gains = {0: 0.04, 1: 0.02, 2: 0.03}
    measured = {
        Run(arithmetic, variant, seed): measurement(0.5 + 0.1 * seed + (gain if arithmetic == "bf16_after" else 0))
        for seed, gain in gains.items()
        for arithmetic in ("bf16_after", "bf16_before")
        for variant in ("intra", "intra_reset")
        if (arithmetic, variant) != ("bf16_after", "intra")
    }
    assert estimate(RELATIVITY, measured, recall_at()) is None
    measured |= {Run("bf16_after", "intra", seed): measurement(0.5 + 0.1 * seed) for seed in (0, 1)}
    effect = estimate(RELATIVITY, measured, recall_at())
    assert effect is not None
    assert effect.each == pytest.approx((0.04, 0.02))
    assert effect.mean == pytest.approx(0.03)
    assert effect.high - effect.mean == pytest.approx(stats.t.ppf(0.975, 1) * 0.01)


@pytest.mark.parametrize(
    ("effect", "control", "reading"),
    [
        ([0.04, 0.05, 0.06], [-0.1, -0.11, -0.12], "broken relativity matters"),
        ([0.0, 0.001, -0.001], [-0.1, -0.11, -0.12], "refuted at this size"),
        ([0.1, -0.1, 0.05], [-0.1, -0.11, -0.12], "not settled"),
        ([0.04, 0.05, 0.06], [-0.1, 0.1, 0.0], "inconclusive"),
        ([0.04], [-0.1], "not yet run"),
    ],
)
def test_the_reading_needs_the_positive_control(effect, control, reading):
    assert reading in read_relativity(summarise("", effect), summarise(CONTROL.name, control))


def test_an_effect_is_read_by_the_side_of_its_interval():
    words = ("above", "below", "neither")
    assert read(summarise("", [0.1, 0.11, 0.12]), *words) == "above"
    assert read(summarise("", [-0.1, -0.11, -0.12]), *words) == "below"
    assert read(summarise("", [-0.1, 0.1, 0.0]), *words) == "neither"
    assert read(None, *words) == read(summarise("", [0.1]), *words) == "not yet run"


def test_seeds_for_power_are_those_of_the_t_test():
    seeds = seeds_for_power(0.05, 0.03)
    for n, enough in ((seeds, True), (seeds - 1, False)):
        needed = stats.t.ppf(0.975, n - 1) + stats.t.ppf(0.8, n - 1)
        assert bool(0.03 * n**0.5 / 0.05 >= needed) is enough
