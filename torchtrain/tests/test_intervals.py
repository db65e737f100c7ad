"""Scores, and how sure a mean and a difference are."""

import numpy as np
import pytest
import scipy.stats

from torchtrain.evaluation.intervals import (
    format_perplexity,
    mean_interval,
    paired_interval,
    sign_flip,
    student_interval,
)


def test_a_mean_has_wilsons_interval_and_students_where_scores_have_no_bounds():
    assert mean_interval([2.0, 3.0, 5.0]) == student_interval([2.0, 3.0, 5.0])
    assert mean_interval([1.0] * 8) == pytest.approx((1.0, 0.6756, 1.0), abs=1e-4)
    assert mean_interval([0.0] * 8) == pytest.approx((0.0, 0.0, 0.3244), abs=1e-4)


def test_intervals_are_paired_by_sample():
    draw = np.random.default_rng(1)
    hard = draw.random(300)
    a, b = [(hard > 0.5).astype(float)], [(hard > 0.45).astype(float)]  # b finds what a finds, and a little more
    mean, low, high = paired_interval(b, a)
    assert 0 < low < mean < high
    shuffled = [draw.permutation(b[0])]
    assert paired_interval(shuffled, a)[1] < 0  # unpaired, as much tells nothing


def test_signs_are_tried_or_drawn():
    """Against the exact test of McNemar: samples of 0 and 1 differ by a sign alone."""
    zeros = np.zeros(500)
    for n in (3, 6, 9):
        few, p = zeros.copy(), scipy.stats.binomtest(n, n).pvalue
        few[:n] = 1
        assert sign_flip([few], [zeros]) == pytest.approx(p)
    many = zeros.copy()
    many[:30], many[30:50] = 1, -1
    assert sign_flip([many], [zeros]) == pytest.approx(scipy.stats.binomtest(30, 50).pvalue, abs=0.02)
    assert sign_flip([zeros], [zeros]) == 1


def test_equal_scores_do_not_prove_two_runs_equal():
    mean, low, high = paired_interval([np.zeros(20)] * 3, [np.zeros(20)] * 3)
    unseen = (1 - 0.025 ** (1 / 20)) / 3**0.5
    assert (mean, low, high) == pytest.approx((0.0, -unseen, unseen))
    assert paired_interval([np.ones(5)], [np.zeros(5)])[2] == 1
    # A task of one sample weighs as much as one of two hundred, and alone may move the mean by half.
    _, low, high = paired_interval([np.zeros(1), np.zeros(200)], [np.zeros(1), np.zeros(200)])
    assert -low == high > 0.48
    varied = np.random.default_rng(0).integers(0, 2, 200).astype(float)
    alone = paired_interval([varied], [varied[::-1]])
    mean, low, high = paired_interval([np.ones(1), varied], [np.zeros(1), varied[::-1]])
    assert mean - low == pytest.approx(np.hypot((alone[0] - alone[1]) / 2, 0.975), rel=0.01)  # the one might be -1
    assert high - mean == pytest.approx((alone[2] - alone[0]) / 2, rel=0.01)  # and no more than 1


def test_students_interval_and_numbers_that_are_equal_but_for_rounding():
    losses = np.array([2, 3.7, 0.9, 5.3])
    expected = scipy.stats.t.interval(0.95, 3, np.mean(losses), scipy.stats.sem(losses))
    assert student_interval(losses) == pytest.approx((np.mean(losses), *expected))
    assert student_interval([0.3]) is None
    assert np.ptp(losses - (losses + 0.1)) > 0  # by rounding alone
    assert student_interval(losses - (losses + 0.1)) is None


@pytest.mark.parametrize(
    ("loss", "told"), [(0.0, "1.00"), (13.0, "442413.39"), (20.0, "4.9e+08"), (708.0, "3.0e+307"), (800.0, "inf")]
)
def test_a_perplexity_is_told_whatever_it_is(loss, told):
    assert format_perplexity(loss) == told
