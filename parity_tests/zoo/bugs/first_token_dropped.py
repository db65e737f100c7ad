"""The first token of each document is seen by itself alone."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _alone(document_ids_BT: Tensor) -> Tensor:
    first_BT = torch.zeros_like(document_ids_BT, dtype=torch.bool)
    first_BT[:, 1:] = (document_ids_BT[:, 1:] != document_ids_BT[:, :-1]) & (document_ids_BT[:, 1:] > 0)
    alone = document_ids_BT.amax() + torch.arange(1, document_ids_BT.shape[1] + 1, device=document_ids_BT.device)
    return torch.where(first_BT, alone, document_ids_BT)


BUG = Bug(
    what="first token of each document cut off",
    where="masks built from BOS tokens: swiss-ai Megatron-LM PR 45 has an option by which no token attends to BOS",
    stage="forward",
    apply=lambda: documents(_alone),
    likely={"variant": ("anchor", "intra")},
)
