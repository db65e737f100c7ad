"""Neighbouring pairs rotate together (GPT-J, Meta's Llama) though the weights are for halves (GPT-NeoX)."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rotation


def _rotate(x_BHTD: Tensor, cos_B1TD: Tensor, sin_B1TD: Tensor) -> Tensor:
    cos, sin = (table[..., : table.shape[-1] // 2].repeat_interleave(2, dim=-1) for table in (cos_B1TD, sin_B1TD))
    turned = torch.stack((-x_BHTD[..., 1::2], x_BHTD[..., ::2]), dim=-1).flatten(-2)
    return x_BHTD * cos + turned * sin


def _interleave(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


BUG = Bug(
    what="interleaved pairs instead of halves",
    where=(
        "every port between Meta's and transformers' Llama: transformers issue 25199, "
        "flash-attention issue 288, shainet PR 111"
    ),
    stage="forward",
    apply=lambda: rotation(_interleave),
)
