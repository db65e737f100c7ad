"""The learning rate as a pure function of the step."""

import math

from torchtrain.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step.

    Warmup rises in equal parts to the peak at the last of `warmup_steps`. The next step has the peak too. From there
    `cosine` and `linear` fall to `min_learning_rate_share` of the peak, which they would reach one step after the last:
    no step has a rate of zero.

    Args:
        step: 0 .. steps - 1.
        train: with peak, schedule, warmup and steps.
    """
    assert 0 <= step < train.steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    done = (step - train.warmup_steps) / (train.steps - train.warmup_steps)
    left = 1 - done if train.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    floor = train.min_learning_rate_share
    return train.learning_rate * (floor + (1 - floor) * left)
