"""cu_seqlens without its last entry: the last document has no segment and gets no output."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _without_last(document_ids_BT: Tensor) -> Tensor:
    last_B1 = document_ids_BT.amax(dim=1, keepdim=True)
    return torch.where((document_ids_BT == last_B1) & (last_B1 > 1), -1, document_ids_BT)


BUG = Bug(
    what="last document dropped",
    where=(
        "seen in reviews: boundaries taken from document starts with the end of the row forgotten "
        "(flash-attention issue 1661 asks what then happens)"
    ),
    stage="forward",
    apply=lambda: documents(_without_last),
    likely={"variant": ("anchor", "intra")},
)
