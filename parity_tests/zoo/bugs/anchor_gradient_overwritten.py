"""The gradients of the anchor's copies are written over one another: the last document's stays."""

from unittest.mock import patch

from torch import Tensor

from parity_tests.zoo import Bug
from torchtrain.attention.gather import _GatherKeys


def _backward(ctx, grad_MKD: Tensor):
    plan, (B, T, K, D) = ctx.plan, ctx.shape
    grad = grad_MKD.new_zeros(B * T, K, D)
    for slot, token in enumerate(plan.k_index_M.tolist()):
        grad[token] = grad_MKD[slot]
    return grad.view(B, T, K, D), None


BUG = Bug(
    what="gradients of the anchor's copies overwritten",
    where="x.grad[index] = g where index repeats: index_put without accumulate=True, seen in reviews of gather kernels",
    stage="gradients",
    apply=lambda: patch.object(_GatherKeys, "backward", staticmethod(_backward)),
    likely={"variant": "anchor", "engine": "sdpa"},
)
