"""exp(score - max) is rounded to bfloat16 before it is summed, so that the sum divides by something else."""

from torch import Tensor

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import every_engine
from torchtrain.attention.plan import AttentionPlan


def _probabilities(logits: Tensor, mask: Tensor) -> Tensor:
    logits = logits.masked_fill(~mask, -1e30)
    exponentials = (logits - logits.amax(-1, keepdim=True)).exp().bfloat16() * mask
    total = exponentials.sum(-1, keepdim=True)  # in bfloat16 too
    return (exponentials / total.clamp(min=1)).to(logits.dtype)


def _attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, None]:
    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, scale, _probabilities)


BUG = Bug(
    what="P rounded before its sum",
    where=(
        "softmax in the inputs' dtype, which transformers upcasts against (dtype=torch.float32 in "
        "every eager attention); seen in reviews of kernels"
    ),
    stage="forward",
    apply=lambda: every_engine(_attend),
    likely={"dtype": "float32"},
)
