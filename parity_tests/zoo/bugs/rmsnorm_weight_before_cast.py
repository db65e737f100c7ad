"""The weight is multiplied in before the cast to float32, and so enters the mean square."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import in_every_family


def _forward(self, x: Tensor) -> Tensor:
    wide = (self.weight * x).float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).to(x.dtype)


BUG = Bug(
    what="RMSNorm's weight multiplied before the cast",
    where=(
        "where the weight stands relative to the casts is argued in transformers issue 30236 and "
        "TransformerEngine issue 1132"
    ),
    stage="forward",
    apply=lambda: in_every_family("RMSNorm", "forward", lambda _: _forward),
)
