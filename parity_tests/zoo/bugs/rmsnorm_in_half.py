"""Squares and their mean in bfloat16."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _forward(self, x: Tensor) -> Tensor:
    half = x.bfloat16()
    variance = half.pow(2).mean(-1, keepdim=True)
    return self.weight * (half * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


BUG = Bug(
    what="RMSNorm computed in bf16",
    where="lightning-thunder issue 1713 (the upcast was missing), torch issue 189581",
    stage="forward",
    apply=lambda: in_every_family("RMSNorm", "forward", lambda _: _forward),
    likely={"dtype": "float32"},
)
