"""Weights decay at the peak's learning rate, whatever the schedule says."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from parity_tests.zoo import Bug, plain
from torchtrain.training.strategy import Replicated

_init = Replicated.__init__


@contextmanager
def _apply() -> Iterator[None]:
    peak = 0.0

    def init(self, model, train, *args):
        nonlocal peak
        peak = train.learning_rate
        _init(self, model, train, *args)

    class AdamW(plain.AdamW):
        def update(self, parameter, gradient, group):
            decay = group["weight_decay"] * peak / group["lr"]
            super().update(parameter, gradient, group | {"weight_decay": decay})

    with patch.object(Replicated, "__init__", init), patch.object(torch.optim, "AdamW", AdamW):
        yield


BUG = Bug(
    what="weight decay that ignores the schedule",
    where=(
        "decay decoupled from the rate altogether, where torch's AdamW multiplies the two; ports "
        "mix them (seen in reviews)"
    ),
    stage="step",
    apply=_apply,
    likely={"warmup_steps": "5"},
)
