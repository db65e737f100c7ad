"""Every boundary of cu_seqlens lies one token late: a document's first token belongs to the document before."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _late(document_ids_BT: Tensor) -> Tensor:
    before_BT, here_BT = document_ids_BT[:, :-1], document_ids_BT[:, 1:]
    late_BT = torch.where((before_BT > 0) & (here_BT > 0), before_BT, here_BT)
    return torch.cat([document_ids_BT[:, :1], late_BT], dim=1)


BUG = Bug(
    what="cu_seqlens off by one",
    where="EvaByte issue 10 (document mask off by a token); flash-attention issue 880 asks about the leading 0",
    stage="forward",
    apply=lambda: documents(_late),
    likely={"variant": ("anchor", "intra")},
)
