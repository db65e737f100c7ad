"""Each rank's loss is the mean over its own tokens, and ranks are averaged."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import swap
from torchtrain.distributed.world import ALONE
from torchtrain.training.step import count_labels


def _own_labels(parts, world):
    return count_labels(parts, ALONE) * world.size


BUG = Bug(
    what="loss averaged per rank",
    where="torchtitan before PR 2206, prime-rl PR 2562, speculators PR 942, transformers issue 34242",
    stage="gradients",
    apply=lambda: swap(count_labels, _own_labels),
    likely={"ranks": "2"},
)
