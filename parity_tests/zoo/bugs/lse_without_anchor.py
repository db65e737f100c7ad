"""Anchor and document are attended apart and merged, with a log-sum-exp that lacks the anchor's part."""

from torch import Tensor

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import every_engine
from torchtrain.attention.plan import AttentionPlan
from torchtrain.marks import ANCHOR


def _attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, None]:
    ids_BT = plan.document_ids_BT
    foreign_BTT = ((ids_BT == ANCHOR)[:, None, :] & (ids_BT > ANCHOR)[:, :, None])[:, None, None]

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        right = logits.masked_fill(~mask, -1e30).logsumexp(-1, keepdim=True)
        without_anchor = logits.masked_fill(~mask | foreign_BTT, -1e30).logsumexp(-1, keepdim=True)
        return plain.softmax(logits, mask) * (right - without_anchor).exp()

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, scale, probabilities)


BUG = Bug(
    what="log-sum-exp without the anchor",
    where=(
        "seen in reviews; how to merge parts by their log-sum-exp is asked in ring-flash-attention "
        "issue 20, was wrong in NATTEN (PR 299)"
    ),
    stage="forward",
    apply=lambda: every_engine(_attend),
    likely={"variant": "anchor"},
)
