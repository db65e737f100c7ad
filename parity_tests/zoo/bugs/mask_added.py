"""A boolean mask is added to the scores: hidden keys get 0, visible ones 1."""

from torch import Tensor

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import every_engine
from torchtrain.attention.plan import AttentionPlan


def _attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, None]:
    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, scale, lambda logits, mask: (logits + mask).softmax(-1))


BUG = Bug(
    what="boolean mask added to the scores",
    where="transformers' eager attention with a 4D boolean mask (PR 41443), speculators PR 691, diffusers issue 14342",
    stage="forward",
    apply=lambda: every_engine(_attend),
)
