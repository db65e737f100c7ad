"""The learning rate at each step, by hand."""

import pytest

from torchtrain.config import TrainConfig
from torchtrain.training.schedule import learning_rate


def rates(**settings) -> list[float]:
    train = TrainConfig(learning_rate=8.0, **settings)
    return [learning_rate(step, train) for step in range(train.steps)]


def test_constant():
    assert rates(steps=3) == [8, 8, 8]


def test_warmup_reaches_the_peak_with_its_last_step():
    assert rates(steps=6, warmup_steps=4) == [2, 4, 6, 8, 8, 8]


def test_linear_starts_at_the_peak_and_never_wastes_a_step_at_zero():
    assert rates(steps=6, warmup_steps=2, schedule="linear") == [4, 8, 8, 6, 4, 2]


def test_linear_falls_towards_its_share():
    assert rates(steps=4, schedule="linear", min_learning_rate_share=0.5) == [8, 7, 6, 5]


def test_cosine_is_half_way_down_in_the_middle():
    down = rates(steps=4, schedule="cosine", min_learning_rate_share=0.25)
    assert down[0] == 8
    assert down[2] == pytest.approx(8 * (0.25 + 0.75 / 2), rel=1e-15)
    assert down[1] + down[3] == pytest.approx(2 * down[2], rel=1e-15)  # symmetric about the middle


def test_all_warmup():
    assert rates(steps=2, warmup_steps=2, schedule="cosine") == [4, 8]
