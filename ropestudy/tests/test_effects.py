"""Intervals: against a table, of constants, and how often they hold the truth."""

import math

import numpy as np
import pytest

from ropestudy.report.effects import (
    difference_of,
    exponent_of,
    fold_of,
    format_number,
    mean_of,
    typical_of,
)

RANDOM = np.random.default_rng(7)


def test_students_interval_against_a_table_and_how_often_it_holds_the_truth():
    """t of 7 degrees of freedom has 2.3646 at 97.5 per cent, and 4.7853 at 99.9."""
    x = RANDOM.normal(size=8)
    error = x.std(ddof=1) / 8**0.5
    effect = difference_of(x.tolist(), [0.0] * 8)
    assert (effect.low, effect.high) == pytest.approx((x.mean() - 2.364624 * error, x.mean() + 2.364624 * error))
    assert mean_of(x.tolist(), 0.998).high == pytest.approx(x.mean() + 4.785290 * error)
    fold = fold_of(np.exp(x).tolist(), [1.0] * 8)
    assert (fold.low, fold.high) == pytest.approx((np.exp(effect.low), np.exp(effect.high)))
    held = [e.low <= 0 <= e.high for e in (mean_of(RANDOM.normal(size=8).tolist()) for _ in range(2000))]
    assert np.mean(held) == pytest.approx(0.95, abs=0.02)


def test_effects_are_paired_text_by_text_and_not_ruled_by_one():
    x = RANDOM.lognormal(sigma=2, size=8)
    effect, apart = fold_of((3 * x).tolist(), x.tolist()), difference_of((x + 1).tolist(), x.tolist())
    assert (effect.low, effect.value, effect.high) == pytest.approx((3, 3, 3))
    assert (apart.low, apart.value, apart.high) == pytest.approx((1, 1, 1))
    assert fold_of([2.0, 2.0, 2.0, 16.0], [1.0] * 4).value == pytest.approx(2 * 8**0.25)
    assert fold_of([0.0, 2.0], [0.0, 1.0]).value == pytest.approx(2**0.5)
    assert typical_of([0.0, 3.0]).value == 0


def test_an_exponent_is_fitted_to_each_text():
    sizes, texts = [64, 128, 256, 1024], RANDOM.lognormal(size=5)
    effect = exponent_of(sizes, [[t**0.17 * x for x in texts] for t in sizes])
    assert (effect.low, effect.value, effect.high) == pytest.approx((0.17, 0.17, 0.17))


def test_one_text_settles_nothing():
    one = mean_of([3.0])
    assert (one.low, one.high, one.written()) == (-math.inf, math.inf, "3 (one text)")


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0123456, "0.0123"), (1.234e-5, "1.23e-5"), (1230.4, "1,230"), (999.9, "1,000"), (121.4, "121"), (0.0, "0")],
)
def test_numbers_are_short(value, shown):
    assert format_number(value) == shown
