"""Steps of the warmup count in the decay, so that it begins below the peak."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rates


def _from_the_start(rate, step, train):
    return rate(step, train if step < train.warmup_steps else train.model_copy(update={"warmup_steps": 0}))


BUG = Bug(
    what="decay that counts the warmup's steps",
    where="progress taken as step / steps, seen in reviews; timm issue 1242 (a sharp drop where the warmup ends)",
    stage="trajectory",
    apply=lambda: rates(_from_the_start),
    likely={"schedule": ("cosine", "linear")},
)
