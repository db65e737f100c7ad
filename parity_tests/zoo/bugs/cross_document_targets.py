"""The last token of each document is trained to predict the first of the next, which it does not see."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import wrap
from torchtrain.data.rows import build_row


def _make(build):
    def across(spans, pack, *args, **kwargs):
        return build(spans, pack.model_copy(update={"cross_document_targets": True}), *args, **kwargs)

    return across


BUG = Bug(
    what="cross-document targets kept",
    where="AnchorContext; torchtitan before PR 4075, torchtune issue 1177, profam PR 504",
    stage="loss",
    apply=lambda: wrap(build_row, _make),
)
