"""The loss takes logits that were rounded to bfloat16."""

import torch.nn.functional as F

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import swap
from torchtrain.training.loss import _losses


def _round(logits_nV, labels_n):
    return F.cross_entropy(logits_nV.bfloat16().to(logits_nV.dtype), labels_n, reduction="none")


BUG = Bug(
    what="logits rounded to bf16 before the loss",
    where="optax issue 1020, modalities PR 464, marin PR 8217 (its loss erred 0.25 at most, unnoticed)",
    stage="loss",
    apply=lambda: swap(_losses, _round),
    likely={"dtype": "float32"},
)
