"""Documents of a row attend to one another: what transformers' detection of packing does under a cache, put straight
into the plan, since our own code path asks for no cache and passes the documents itself."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import documents


def _one_document(document_ids_BT: Tensor) -> Tensor:
    return document_ids_BT.clamp(max=1)


BUG = Bug(
    what="documents leak into one another",
    where=(
        "transformers detects packing only without cache and mask (PR 46634, profam issue 495); TRL "
        "issue 1230, nanoVLM PR 204"
    ),
    stage="forward",
    apply=lambda: documents(_one_document),
    likely={"variant": ("anchor", "intra")},
)
