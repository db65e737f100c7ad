"""The anchor belongs to the first document, and only that one sees it."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _first_only(document_ids_BT: Tensor) -> Tensor:
    return document_ids_BT.masked_fill(document_ids_BT == 0, 1)


BUG = Bug(
    what="anchor visible to one document only",
    where=(
        "what intra-document masking does with a row's BOS, left on under AnchorAttention (arXiv "
        "2411.13476 compares the two)"
    ),
    stage="forward",
    apply=lambda: documents(_first_only),
    likely={"variant": "anchor"},
)
