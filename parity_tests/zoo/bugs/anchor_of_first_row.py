"""Only the first row of a batch has its anchor in front of its documents."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _first_row_only(document_ids_BT: Tensor) -> Tensor:
    return torch.cat([document_ids_BT[:1], document_ids_BT[1:].masked_fill(document_ids_BT[1:] == 0, 1)])


BUG = Bug(
    what="anchor only in the first row",
    where="seen in reviews: a batch flattened to one packed row, of which only index 0 is taken for the anchor",
    stage="forward",
    apply=lambda: documents(_first_row_only),
    likely={"variant": "anchor"},
)
