"""The learning rate falls towards zero, whatever share of it the config keeps."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rates


def _to_zero(rate, step, train):
    return rate(step, train.model_copy(update={"min_learning_rate_share": 0.0}))


BUG = Bug(
    what="learning rate's floor ignored",
    where="GPT-NeoX PR 1008 (min_lr only cut the curve off), MLX before PR 859 (no floor at all)",
    stage="trajectory",
    apply=lambda: rates(_to_zero),
    likely={"schedule": ("cosine", "linear")},
)
