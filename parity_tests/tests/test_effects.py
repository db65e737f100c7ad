"""Contrasts of paired runs: their tables, their intervals, and how they are read."""

import numpy as np
import pytest
from scipy import stats

from benchmarks.experiment.effects import correct, detectable, estimate, read, table_of
from benchmarks.experiment.recall import Answers, Measurement
from benchmarks.experiment.spec import Contrast, Run

GAIN = Contrast(question="x", plus=["bits7_after/anchor"], minus=["bits7_after/intra"], above="up", below="down")


def measurement(nats: np.ndarray) -> Measurement:
    """Of rows that open with BOS; without it the loss is twice as much."""
    bos, other = (Answers(nats=x.tolist(), recall=[0.5] * len(x)) for x in (nats, 2 * nats))
    return Measurement(bos=bos, no_bos=other, exact=bos, sink=0.1, losses=[1.0], seconds=1.0)


def test_a_contrast_is_taken_within_seeds_that_have_all_its_runs():
    base = np.array([[1.0, 2.0, 3.0], [2.0, 2.0, 5.0]])  # distances, rows
    measured = {Run("bits7_after", "intra", seed): measurement(base + seed) for seed in range(3)}
    assert estimate(table_of(GAIN, measured), 0.95) is None
    measured |= {Run("bits7_after", "anchor", seed): measurement(base * 0.5 + seed) for seed in (0, 2)}
    table = table_of(GAIN, measured)
    assert table == pytest.approx(np.array([[0.75, 1.0, 2.0]] * 2))
    assert table_of(GAIN, measured, "no_bos") == pytest.approx(2 * table)
    assert table_of(GAIN, measured, distance=1) == pytest.approx(np.array([[1.0, 1.0, 2.5]] * 2))


def test_the_interval_covers_other_seeds_and_other_rows():
    """Means of tables whose seeds and rows both have an effect of their own: 95% of the intervals hold the truth."""
    random, held = np.random.default_rng(0), 0
    for _ in range(400):
        table = 0.3 + random.normal(size=(8, 1)) + random.normal(size=(1, 24)) + random.normal(size=(8, 24))
        effect = estimate(table, 0.95)
        assert effect is not None
        held += abs(effect.mean - 0.3) <= effect.half
    assert 0.93 <= held / 400 <= 0.985


def test_without_an_effect_of_rows_it_is_nearly_students_over_seeds():
    each = np.array([0.1, 0.3, 0.2, 0.5])
    effect = estimate(np.repeat(each[:, None], 10, axis=1), 0.95)
    assert effect is not None
    assert effect.freedom == pytest.approx(3)
    assert effect.half == pytest.approx(stats.t.ppf(0.975, 3) * each.std(ddof=1) / 2)
    assert effect.p == pytest.approx(stats.ttest_1samp(each, 0).pvalue)
    same = estimate(np.zeros((4, 3)), 0.95)
    assert same is not None
    assert (same.half, same.p) == (0.0, 1.0)


def test_holm_multiplies_the_least_by_all_and_never_falls():
    assert correct([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert correct([0.6, 0.7]) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("mean", "corrected", "reading"), [(0.1, 0.04, "up"), (-0.1, 0.04, "down"), (0.1, 0.06, "not shown")]
)
def test_an_effect_is_read_by_its_side_if_it_holds_after_the_correction(mean, corrected, reading):
    noise = np.array([-1e-3, 1e-3])[:, None] * np.ones(4)
    assert read(GAIN, estimate(mean + noise, 0.95), corrected) == reading
    assert read(GAIN, estimate((mean + noise)[:1], 0.95), corrected) == "not yet run"


def test_what_is_detectable_counts_seeds_and_rows():
    needed = stats.t.ppf(0.975, 7) + stats.t.ppf(0.8, 7)
    each = np.array([0.1, -0.2, 0.3, 0.0, 0.1, 0.2, -0.1, 0.4])[:, None] * np.ones(5)
    alone, more = estimate(each, 0.95), estimate(each + np.linspace(-1, 1, 5), 0.95)
    assert alone is not None
    assert more is not None
    assert detectable(alone) == pytest.approx(needed * each[:, 0].std(ddof=1) / 8**0.5)
    assert detectable(more) > 2 * detectable(alone)
