"""Causal attention in half precision on a CPU, rounded as FlashAttention-2 rounds.

torch's CPU kernel errs more than that in its backward pass in bfloat16, where it sums dk and dv over blocks of queries
in bfloat16 (docs/LOG.md). So the backward pass runs in float32, and each gradient is rounded once. The forward pass
rounds as FlashAttention-2's (float32 logits, softmax and accumulator, P rounded for P V); in bfloat16 it is two to
three times as fast as in float32 where the processor has tiles for it (AMX), and no faster elsewhere, where it runs in
float32. What is kept for the backward pass is in half precision either way. `products_on_cpu` says who multiplies.
A float32 model takes the same road, in which nothing is rounded.

Upstream: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.

Legend: B batch · H query heads · K key/value heads · n tokens · D head_dim.
"""

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from torchtrain.attention.products_on_cpu import exact_products, has_tiles

CAUSAL = "anchorline::causal_attention"


@torch.library.custom_op(CAUSAL, mutates_args=())
def _attend(q_BHnD: Tensor, k_BKnD: Tensor, v_BKnD: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of q and the log-sum-exp: one operation, so that both can be kept as they are."""
    dtype = torch.bfloat16 if q_BHnD.dtype == torch.bfloat16 and has_tiles() else torch.float32
    q, k, v = (x.to(dtype) for x in (q_BHnD, k_BKnD, v_BKnD))
    with exact_products(q.shape[2]):
        out_BHnD, lse_BHn = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=True, scale=scale
        )
    return out_BHnD.to(q_BHnD.dtype), lse_BHn


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q_BHnD: Tensor, k_BKnD: Tensor, v_BKnD: Tensor, scale: float) -> Tensor:
        out_BHnD, lse_BHn = _attend(q_BHnD, k_BKnD, v_BKnD, scale)
        ctx.save_for_backward(q_BHnD, k_BKnD, v_BKnD, out_BHnD, lse_BHn)
        ctx.scale = scale  # type: ignore[attr-defined]
        return out_BHnD

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_BHnD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *tensors, lse_BHn = ctx.saved_tensors  # type: ignore[attr-defined]
        grad, q, k, v, out = (x.float() for x in (grad_BHnD, *tensors))
        with exact_products(q.shape[2]):
            gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad,
                q,
                k,
                v,
                out,
                lse_BHn,
                0.0,
                True,
                scale=ctx.scale,  # type: ignore[attr-defined]
            )
        return *(x.to(grad_BHnD.dtype) for x in gradients), None


def attend_half(q_BHnD: Tensor, k_BKnD: Tensor, v_BKnD: Tensor, scale: float) -> Tensor:
    """Return out [B, H, n, D] of queries in half precision or float32, each of which sees all keys up to its own."""
    return _CausalAttention.apply(q_BHnD, k_BKnD, v_BKnD, scale)  # type: ignore[return-value]
