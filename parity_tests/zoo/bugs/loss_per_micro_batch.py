"""Each micro-batch's gradient is that of its own mean, divided by their number."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import swap
from torchtrain.marks import IGNORED
from torchtrain.training.step import count_labels
from torchtrain.training.strategy import Replicated

_losses = Replicated.losses


def _mean_losses(self, part, plan, chunk, scale=1.0):
    total, each_Bt = _losses(self, part, plan, chunk, scale)
    return total / (part["shift_labels"] != IGNORED).sum().clamp(min=1), each_Bt


@contextmanager
def _apply() -> Iterator[None]:
    with patch.object(Replicated, "losses", _mean_losses), swap(count_labels, lambda parts, world: len(parts)):
        yield


BUG = Bug(
    what="loss averaged per micro-batch",
    where=(
        "transformers up to 4.45 (PR 34191, issue 34242) and everyone: torchtune PR 1875, "
        "torchtitan PR 2206, prime-rl PR 583"
    ),
    stage="gradients",
    apply=_apply,
)
