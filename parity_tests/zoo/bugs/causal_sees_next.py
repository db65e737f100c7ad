"""The mask is open one place above its diagonal: every token sees the one it is to predict."""

from torch import Tensor

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import every_engine
from torchtrain.attention.plan import AttentionPlan


def _attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, None]:
    ids_BT = plan.document_ids_BT
    same_BTT = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (ids_BT >= 0)[:, None, :]
    next_BTT = same_BTT.triu(1).tril(1)[:, None, None]
    return plain.attend(
        q_BTHD, k_BTKD, v_BTKD, plan, scale, lambda logits, mask: plain.softmax(logits, mask | next_BTT)
    )


BUG = Bug(
    what="causal mask off by one: the next token is seen",
    where="triu(diagonal=2) for triu(diagonal=1), seen in reviews; the training loss falls to nothing",
    stage="forward",
    apply=lambda: every_engine(_attend),
)
