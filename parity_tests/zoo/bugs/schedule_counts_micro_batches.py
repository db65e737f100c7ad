"""The schedule moves on with every micro-batch, and so ends too early."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rates


def _by_micro_batch(rate, step, train):
    return rate(min(step * train.sequences_per_step // train.micro_batch, train.steps - 1), train)


BUG = Bug(
    what="schedule moved on by every micro-batch",
    where="accelerate issue 963; once a process: accelerate issue 2926, transformers PR 24088, diffusers issue 3954",
    stage="trajectory",
    apply=lambda: rates(_by_micro_batch),
    likely={"schedule": ("cosine", "linear")},
)
