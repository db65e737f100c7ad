"""Every document starts at 0 where positions should run on: the anchor is at every document's first place."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions


def _restart(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    index_T = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    begins_BT = torch.ones_like(document_ids_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return index_T - torch.where(begins_BT, index_T, 0).cummax(dim=1).values


BUG = Bug(
    what="positions reset in every document (anchor included)",
    where=(
        "padding-free collators that reset positions by themselves (transformers' "
        "DataCollatorWithFlattening) under a recipe that must not"
    ),
    stage="forward",
    apply=lambda: positions(_restart),
    likely={"variant": "anchor"},
)
