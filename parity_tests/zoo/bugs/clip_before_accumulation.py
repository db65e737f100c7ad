"""What has been accumulated is clipped after every micro-batch, and so what came first counts least."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import nn

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.modeling.head import hidden_states
from torchtrain.training.optimizer import Optimizer

_init = Optimizer.__init__


@contextmanager
def _apply() -> Iterator[None]:
    limit = float("inf")

    def init(self, model, train):
        nonlocal limit
        limit = train.clip_norm
        _init(self, model, train)

    def make(original):
        def clip(model, batch, plan=None):
            nn.utils.clip_grad_norm_(model.parameters(), limit)
            return original(model, batch, plan)

        return clip

    with patch.object(Optimizer, "__init__", init), wrap(hidden_states, make):
        yield


BUG = Bug(
    what="gradients clipped before they are accumulated",
    where="transformers issues 986 and 1563 (the example scripts), praxis PR 6",
    stage="gradients",
    apply=_apply,
    likely={"dtype": "float32"},
)
