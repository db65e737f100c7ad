"""The learning rate as a pure function of the step."""

import math

from torchtrain.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step.

    Warmup rises in equal parts and reaches the peak with the last of `warmup_steps`. The first step after it has the
    peak; from there `cosine` and `linear` fall towards `min_learning_rate_share` of it, which the step after the last
    would have, so that no step is spent at zero.

    Args:
        step: 0 .. steps - 1.
        train: peak, schedule, warmup and steps.
    """
    assert 0 <= step < train.steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    done = (step - train.warmup_steps) / (train.steps - train.warmup_steps)
    left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[train.schedule]
    if train.schedule == "constant":
        return train.learning_rate
    floor = train.min_learning_rate_share
    return train.learning_rate * (floor + (1 - floor) * left)
