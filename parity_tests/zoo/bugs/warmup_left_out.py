"""The first step has the peak's learning rate already."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rates


def _at_the_peak(rate, step, train):
    return rate(max(step, train.warmup_steps), train)


BUG = Bug(
    what="warmup left out",
    where=(
        "seen in reviews: warmup configured in one place (DeepSpeed's scheduler, the trainer's) and "
        "expected of the other"
    ),
    stage="step",
    apply=lambda: rates(_at_the_peak),
    likely={"warmup_steps": "5"},
)
