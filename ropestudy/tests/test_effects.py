"""Intervals: against slow twins, of constants and of noise, and how often they hold the truth."""

import math

import numpy as np
import pytest

from ropestudy.report import effects
from ropestudy.report.effects import (
    common_share,
    difference_of,
    exponent_of,
    exponents_apart,
    known,
    mean_of,
    quotient_of,
    rms_of,
)

RANDOM = np.random.default_rng(7)


def test_a_mean_against_a_twin_in_a_loop():
    x = RANDOM.normal(size=8)
    found = mean_of(x.tolist())
    drawn = np.random.default_rng(effects.SEED).integers(0, 8, (effects.DRAWS, 8))
    means = sorted(float(np.mean([x[i] for i in one])) for one in drawn)
    edge = int(effects.DRAWS * 0.025)
    assert found.value == pytest.approx(x.mean())
    assert (found.low, found.high) == pytest.approx((means[edge], means[-1 - edge]))


def test_an_interval_holds_the_truth_as_often_as_eight_texts_allow():
    """95 per cent of the bootstrap's are some 88 per cent of eight normal draws; the page says bootstrap."""
    held = [e.low <= 0 <= e.high for e in (mean_of(RANDOM.normal(size=8).tolist()) for _ in range(300))]
    assert 0.80 < np.mean(held) < 0.97


def test_students_interval_against_a_table_and_how_often_it_holds_the_truth():
    """t of 7 degrees of freedom has 2.3646 at 97.5 per cent, and 4.7853 at 99.9."""
    x = RANDOM.normal(size=8)
    error = x.std(ddof=1) / 8**0.5
    found = difference_of(x.tolist(), [0.0] * 8)
    assert (found.low, found.high) == pytest.approx((x.mean() - 2.364624 * error, x.mean() + 2.364624 * error))
    assert effects.student(x.tolist(), 0.998).high == pytest.approx(x.mean() + 4.785290 * error)
    fold = effects.fold_of(np.exp(x).tolist(), [1.0] * 8)
    assert (fold.low, fold.high) == pytest.approx((np.exp(found.low), np.exp(found.high)))
    held = [e.low <= 0 <= e.high for e in (effects.student(RANDOM.normal(size=8).tolist()) for _ in range(2000))]
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)
    assert str(effects.fold_of([4.0], [2.0])) == "2 (one text)"
    assert effects.typical_of([0.0, 3.0]).value == 0


def test_what_is_paired_is_compared_text_by_text():
    x = RANDOM.lognormal(sigma=2, size=8)
    found = quotient_of((3 * x).tolist(), x.tolist())
    assert (found.low, found.value, found.high) == pytest.approx((3, 3, 3))
    apart = difference_of((x + 1).tolist(), x.tolist())
    assert (apart.low, apart.value, apart.high) == pytest.approx((1, 1, 1))


def test_a_fold_is_not_ruled_by_one_text():
    x = RANDOM.lognormal(size=8)
    found = effects.fold_of((x * np.exp(RANDOM.normal(size=8) * 1e-6)).tolist(), x.tolist())
    assert found.value == pytest.approx(1, abs=1e-5)
    large = effects.fold_of([2.0, 2.0, 2.0, 16.0], [1.0] * 4)
    assert large.value == pytest.approx(2 * 8**0.25)
    assert effects.typical_of([1.0, 100.0]).value == pytest.approx(10)
    assert effects.fold_of([0.0, 2.0], [0.0, 1.0]).value == pytest.approx(2**0.5)


def test_quotients_of_nothing():
    assert quotient_of([0.0, 0.0], [0.0, 0.0]).value == 1
    assert math.isinf(quotient_of([1.0, 1.0], [0.0, 0.0]).value)


def test_exponents():
    sizes = [64, 128, 256, 1024]
    texts = RANDOM.lognormal(size=5)
    first = [[t**0.17 * x for x in texts] for t in sizes]
    rest = [[t**0.5 * x for x in texts] for t in sizes]
    found = exponent_of(sizes, first)
    assert (found.low, found.value, found.high) == pytest.approx((0.17, 0.17, 0.17))
    assert exponents_apart(sizes, first, rest).value == pytest.approx(-0.33)
    assert exponent_of([64], [first[0]]) == known(0.0)
    assert exponent_of(sizes, [[0.0] * 5] * 4) == known(0.0)


def test_what_is_common_to_all_texts():
    """A constant with noise of its size: half; noise alone: nothing, whatever the number of texts."""
    constant, noise = RANDOM.normal(size=2000), RANDOM.normal(size=(8, 2000))
    mixed, alone = constant + noise, noise
    for vectors, share in ((mixed, 0.5), (alone, 0.0), (constant + 0 * noise, 1.0)):
        found = common_share((vectors @ vectors.T / 2000).tolist())
        assert found.value == pytest.approx(share, abs=0.05)
        assert found.low - 0.05 <= share <= found.high + 0.05
    assert rms_of((mixed @ mixed.T / 2000).tolist()).value == pytest.approx(2**0.5, rel=0.05)


def test_one_text_settles_nothing():
    one = mean_of([3.0])
    assert (one.low, one.high, str(one)) == (-math.inf, math.inf, "3 (one text)")
    assert one.within(2, 4) is None


@pytest.mark.parametrize(
    ("low", "high", "said"), [(0.5, 2.5, True), (2.1, 9, False), (-9, 0.9, False), (1.5, 9, None), (-9, 1.5, None)]
)
def test_margins(low, high, said):
    assert effects.Effect(1.5, 1.0, 2.0, 8).within(low, high) is said
