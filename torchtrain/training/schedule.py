"""The learning rate as a pure function of the step."""

import math

from torchtrain.config import TrainConfig


def learning_rate(step: int, train: TrainConfig) -> float:
    """Return the learning rate of a step.

    Warmup rises in equal parts to the peak at the last of `warmup_steps`. The next step has the peak too. From there
    `cosine` and `linear` fall to `min_learning_rate_share` of the peak, which they would reach one step after the last:
    no step has a rate of zero. `wsd` (arXiv 2404.06395) falls like this in the last `decay_steps`, linearly or by
    1 - sqrt (arXiv 2405.18392); the first of them has the peak.

    step: 0 .. steps - 1.
    """
    assert 0 <= step < train.steps
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return train.learning_rate
    falling = train.decay_steps or train.steps - train.warmup_steps
    done = max(0, step - (train.steps - falling)) / falling
    if train.schedule == "cosine":
        left = (1 + math.cos(math.pi * done)) / 2
    else:
        left = 1 - (math.sqrt(done) if train.decay == "sqrt" else done)
    floor = train.min_learning_rate_share
    return train.learning_rate * (floor + (1 - floor) * left)
