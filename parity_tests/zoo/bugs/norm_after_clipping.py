"""The norm that a step reports is that of the clipped gradient."""

from unittest.mock import patch

from parity_tests.zoo import Bug
from torchtrain.training.optimizer import Optimizer

_step = Optimizer.step


def _clip(self, learning_rate, *found):
    norm = _step(self, learning_rate, *found)
    return norm if self.clip_norm is None else min(norm, self.clip_norm)


BUG = Bug(
    what="gradient norm reported after clipping",
    where=(
        "a norm that never exceeds the limit says nothing: verl issue 2282 and miles PR 2132 on "
        "which of the two is meant"
    ),
    stage="trajectory",
    apply=lambda: patch.object(Optimizer, "step", _clip),
)
