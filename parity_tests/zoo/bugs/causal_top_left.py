"""Causal masking aligned top-left where queries meet the anchor's keys and their own: each sees A keys too few."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import every_engine
from torchtrain.attention.plan import AttentionPlan
from torchtrain.marks import ANCHOR


def _attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, None]:
    ids_BT = plan.document_ids_BT
    index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    anchors_B11 = (ids_BT == ANCHOR).sum(1)[:, None, None]
    # The query's own place among its keys, were it aligned top-left, is A before where it stands.
    late_BTT = (ids_BT > ANCHOR)[:, :, None] & (index_T[None, None, :] > index_T[None, :, None] - anchors_B11)
    late_BTT &= (ids_BT > ANCHOR)[:, None, :]

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        return plain.softmax(logits, mask & ~late_BTT[:, None, None])

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, scale, probabilities)


BUG = Bug(
    what="causal mask aligned top-left",
    where=(
        "flash-attention before 2.1 (issues 282, 351, 402) and torch's "
        "scaled_dot_product_attention(is_causal=True) to this day"
    ),
    stage="forward",
    apply=lambda: every_engine(_attend),
    likely={"variant": "anchor"},
)
