"""Only the first half of each head's pairs is rotated."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _partial(_: object, inv_freq_C: Tensor) -> Tensor:
    C = inv_freq_C.shape[0]
    return torch.where(torch.arange(C, device=inv_freq_C.device) < C // 2, inv_freq_C, 0)


BUG = Bug(
    what="half of each head rotated",
    where="seen in reviews of ports: GPT-NeoX's partial rotary factor left on for a model that rotates whole heads",
    stage="forward",
    apply=lambda: frequencies(_partial),
)
