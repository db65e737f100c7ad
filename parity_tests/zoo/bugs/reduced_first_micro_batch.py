"""Gradients are added up over ranks after the first micro-batch and not after the last."""

from unittest.mock import patch

from parity_tests.zoo import Bug
from torchtrain.training.strategy import Replicated

_backward = Replicated.backward


def _at_first(self, loss, last):
    _backward(self, loss, last=not last)


BUG = Bug(
    what="gradients reduced after the first micro-batch only",
    where="FunASR before PR 3472: no_sync held on the wrong micro-batch, so ranks stepped by gradients of their own",
    stage="gradients",
    apply=lambda: patch.object(Replicated, "backward", _at_first),
    likely={"ranks": "2"},
)
