"""Positions are the index in the row, whatever position_ids say."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions


def _arange(position_ids_BT: Tensor, _: Tensor) -> Tensor:
    return torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device).expand_as(position_ids_BT)


BUG = Bug(
    what="position_ids ignored",
    where="Megatron-LM issue 453, Megatron-LLM issue 23, NeMo Automodel PR 2377: RoPE tables taken by row index",
    stage="forward",
    apply=lambda: positions(_arange),
    likely={"variant": ("intra_reset", "anchor+interleave", "intra+interleave")},
)
