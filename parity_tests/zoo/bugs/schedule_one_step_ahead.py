"""Each step has the learning rate of the step after it."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rates


def _next(rate, step, train):
    return rate(min(step + 1, train.steps - 1), train)


BUG = Bug(
    what="schedule one step ahead",
    where=(
        "scheduler.step() before optimizer.step(), which torch warns of since 1.1: "
        "pytorch-gradual-warmup-lr PR 11, seen in reviews"
    ),
    stage="trajectory",
    apply=lambda: rates(_next),
    likely={"schedule": ("cosine", "linear")},
)
