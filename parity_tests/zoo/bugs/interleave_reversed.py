"""The chunks of an interleaved document take their positions in the reverse order."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions


def _reverse(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    changed = position_ids_BT.clone()
    for row, documents in zip(changed, document_ids_BT, strict=True):
        for document in documents[documents > 0].unique():
            own = row[documents == document]
            jumps = (own.diff() != 1).nonzero().flatten() + 1
            row[documents == document] = torch.cat(own.tensor_split(jumps.cpu())[::-1])
    return changed


BUG = Bug(
    what="interleaved chunks at the wrong positions",
    where=(
        "AnchorContext's splitter of interleaved chunks slices the whole sequence, not the "
        "document: chunks land in wrong places"
    ),
    stage="forward",
    apply=lambda: positions(_reverse),
    likely={"variant": ("anchor+interleave", "intra+interleave")},
)
