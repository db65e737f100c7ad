"""The optimizer keeps the learning rate of its first step; the schedule is computed, reported and never used."""

from unittest.mock import patch

from parity_tests.zoo import Bug
from torchtrain.training.optimizer import Optimizer

_step = Optimizer.step


def _at_the_first_rate(self, learning_rate, *found):
    self.first_rate = getattr(self, "first_rate", learning_rate)
    return _step(self, self.first_rate, *found)


BUG = Bug(
    what="learning rate set once",
    where=(
        "schedulers bound to another optimizer than the one that steps, as wrapping or resuming "
        "makes it (seen in reviews)"
    ),
    stage="trajectory",
    apply=lambda: patch.object(Optimizer, "step", _at_the_first_rate),
    likely={"schedule": ("cosine", "linear")},
)
