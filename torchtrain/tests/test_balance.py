"""Who waits for whom, against a count by hand and a plan's own rows."""

import numpy as np
import pytest

from torchtrain.data.balance import balance_of
from torchtrain.data.packing import PackPlan


def test_by_hand():
    """Rows of 4 tokens: two of one document, 10 pairs each, and two of four, 4 each."""
    lengths = np.array([4, 4, *[1] * 8])
    (two, four) = balance_of(lengths, [4], ranks=(2, 4))
    assert (two.steps, four.steps) == (2, 1)
    assert two.by_length == 1.0
    assert four.by_length == 10 / 7
    assert balance_of(lengths, [4], ranks=(8,)) == [], "fewer rows than ranks"


@pytest.mark.parametrize("strategy", ["sequential", "by_length", "best_fit"])
def test_live_pairs_are_those_of_the_spans(strategy):
    lengths = np.random.default_rng(0).integers(1, 300, 200)
    plan = PackPlan(lengths, 256, np.ones_like(lengths), seed=1, strategy=strategy)
    counted = [sum(n * (n + 1) // 2 for _, a, b in plan.spans(row) for n in [b - a]) for row in range(len(plan))]
    assert plan.live_pairs().tolist() == counted


def test_rows_that_are_alike_wait_less():
    lengths = np.minimum(np.random.default_rng(0).lognormal(6, 1.5, 4000).astype(int) + 1, 20_000)
    for one in balance_of(lengths, [4096], ranks=(8, 64)):
        assert 1 <= one.by_length < 1 + (one.sequential - 1) / 3
