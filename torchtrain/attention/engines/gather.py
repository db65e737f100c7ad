"""Gathers the tokens that a plan names. The backward pass is deterministic.

An anchor token is gathered once for its own segment and once for every document, so its gradient is a sum over copies.
`index_select` adds them with atomics on a GPU, in any order. Here they are summed in float32, in document order.

Legend: B batch · T tokens of a row · N query tokens · M gathered keys · K heads · D head_dim · R anchor tokens · C
copies.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from torchtrain.attention.plan import AttentionPlan
from torchtrain.marks import PADDING


class _GatherKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x_BTKD: Tensor, plan: AttentionPlan) -> Tensor:
        ctx.plan, ctx.shape = plan, x_BTKD.shape  # type: ignore[attr-defined]
        return x_BTKD.flatten(0, 1).index_select(0, plan.k_index_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_MKD: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        plan: AttentionPlan = ctx.plan  # type: ignore[attr-defined]
        B, T, K, D = ctx.shape  # type: ignore[attr-defined]
        grad = grad_MKD.index_select(0, plan.own_slot_N)
        if not plan.queries_in_order:
            grad = grad_MKD.new_zeros(B * T, K, D).index_copy_(0, plan.q_index_N, grad)
        if plan.anchor_index_R.numel():
            copies_RCKD = grad_MKD[plan.anchor_slot_RC]
            if not plan.copies_fill:
                copies_RCKD = copies_RCKD.masked_fill(plan.no_copy_RC[..., None, None], 0)
            wide = torch.promote_types(grad_MKD.dtype, torch.float32)
            sums_RKD = copies_RCKD[:, 1:].sum(1, dtype=wide).add_(copies_RCKD[:, 0])
            grad.index_copy_(0, plan.anchor_index_R, sums_RKD.to(grad.dtype))
        return grad.view(B, T, K, D), None


def gather_keys(x_BTKD: Tensor, plan: AttentionPlan) -> Tensor:
    """Return [M, K, D]: for each segment the anchor's tokens, then the document's own, of keys or values."""
    if plan.keys_in_order:
        return x_BTKD.flatten(0, 1)
    return _GatherKeys.apply(x_BTKD, plan)  # type: ignore[return-value]


def gather_queries(x_BTHD: Tensor, plan: AttentionPlan) -> Tensor:
    """Return [N, H, D]: the queries of every segment, padding left out."""
    x = x_BTHD.flatten(0, 1)
    return x if plan.queries_in_order else x.index_select(0, plan.q_index_N)


def scatter_queries(x: Tensor, plan: AttentionPlan, fill: float = 0.0) -> Tensor:
    """Inverse of `gather_queries` for [N, ...]: back to [B, T, ...], with `fill` at padding."""
    B, T = plan.document_ids_BT.shape
    if plan.queries_in_order:
        return x.reshape(B, T, *x.shape[1:])
    full = x.new_full((B * T, *x.shape[1:]), fill)
    return full.index_copy(0, plan.q_index_N, x).view(B, T, *x.shape[1:])


def blank_padding(x_BTHD: Tensor, plan: AttentionPlan) -> Tensor:
    """Return x with 0 at padding, and no gradient there. A mask alone multiplies by 0, which keeps NaN and infinity."""
    B, T = plan.document_ids_BT.shape
    if len(plan.q_index_N) == B * T:
        return x_BTHD
    return x_BTHD.masked_fill((plan.document_ids_BT == PADDING)[:, :, None, None], 0)


def attend_nothing(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor) -> Tensor:
    """Return the output [B, T, H, D] of rows that are all padding: zeros, through which autograd reaches q, k and v."""
    return torch.zeros_like(q_BTHD) + sum(x[:0].sum() for x in (q_BTHD, k_BTKD, v_BTKD))
