"""The warmup begins at a learning rate of zero: the first step changes nothing."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rates


def _from_zero(rate, step, train):
    return rate(step, train) * step / (step + 1) if step < train.warmup_steps else rate(step, train)


BUG = Bug(
    what="warmup from a rate of zero",
    where="BERT's own schedule (issue 1293), torchtitan PR 1261 and DeepSpeed PR 5287 on the step that is lost",
    stage="step",
    apply=lambda: rates(_from_zero),
    likely={"warmup_steps": "5"},
)
