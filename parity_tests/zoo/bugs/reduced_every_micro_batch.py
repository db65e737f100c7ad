"""Accumulated gradients are added up over ranks after every micro-batch, those of earlier ones again."""

from unittest.mock import patch

from parity_tests.zoo import Bug
from torchtrain.training.strategy import Replicated

_backward = Replicated.backward


def _at_once(self, loss, last):
    _backward(self, loss, last=True)


BUG = Bug(
    what="gradients reduced after every micro-batch",
    where=(
        "all-reduce of .grad inside the accumulation loop (seen in reviews); DDP's no_sync is for "
        "this: open_lm issue 48, nanochat PR 33"
    ),
    stage="gradients",
    apply=lambda: patch.object(Replicated, "backward", _at_once),
    likely={"ranks": "2"},
)
