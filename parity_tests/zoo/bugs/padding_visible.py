"""Padding is one more document: it attends, to the anchor too, and is not zero."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _one_more(document_ids_BT: Tensor) -> Tensor:
    return torch.where(document_ids_BT < 0, document_ids_BT.amax() + 1, document_ids_BT)


BUG = Bug(
    what="padding attends",
    where="FlashAttention patches that ignore the padding mask: LLM-Workshop issue 1, accelerate issue 1864",
    stage="forward",
    apply=lambda: documents(_one_more),
    likely={"variant": ("anchor", "intra", "full")},
)
