"""Both halves are turned the other way. Scores keep: q and k turn together; the taps after RoPE do not."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rotation


def _turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((second, -first), dim=-1)


def _backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _turn(q) * sin, k * cos + _turn(k) * sin


BUG = Bug(
    what="rotation in the other direction",
    where=(
        "seen in reviews of hand-written kernels: rotate_half as (x2, -x1); a model trained with it "
        "cannot tell, a ported one can"
    ),
    stage="forward",
    apply=lambda: rotation(_backwards),
)
