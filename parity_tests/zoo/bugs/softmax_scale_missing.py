"""Scores are not divided by the root of the head's size."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import attention


def _make(attend):
    return lambda q, k, v, plan, **options: attend(q, k, v, plan, **options | {"scale": 1.0})


BUG = Bug(
    what="softmax scale missing",
    where=(
        "scale arguments that were dropped on their way: tt-metal issue 33304, SKaiNET issue 860, Megatron-LM PR 3698"
    ),
    stage="forward",
    apply=lambda: attention(_make),
)
