"""What was divided by the tokens of all ranks is averaged over the ranks once more."""

from unittest.mock import patch

from parity_tests.zoo import Bug
from torchtrain.training.strategy import Replicated

_backward = Replicated.backward


def _average(self, loss, last):
    _backward(self, loss, last)
    if last:
        for master in self.optimizer.masters:
            if master.grad is not None:
                master.grad /= self.world.size


BUG = Bug(
    what="gradients averaged over ranks where they should be added",
    where="DDP and FSDP average by themselves; prime-rl PR 2562 and torchtitan PR 2206 had to undo it",
    stage="gradients",
    apply=lambda: patch.object(Replicated, "backward", _average),
    likely={"ranks": "2"},
)
