"""Causal attention on a CPU for half precision, attention sinks and windows.

torch's kernel sums dk and dv over blocks of queries in bfloat16 (docs/LOG.md). So the backward pass runs in float32,
and each gradient is rounded once. The forward pass rounds like FlashAttention-2's. It runs in bfloat16 on a processor
with AMX, where that is two to three times as fast, and in float32 on all others. A float32 model takes the same path.

A window of W tokens cuts a document into blocks of W. A token sees its own block up to itself, and the tail of the
block before: causal, too, if its tokens are reversed. So each part is one call of the kernel, and log-sum-exps merge
the outputs; a sink is one more term of that sum. The backward pass is given the merged output and log-sum-exp.

Upstream: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.

Legend: B batch · H query heads · K key/value heads · n tokens · D head_dim · b blocks of W tokens.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from torchtrain.attention.layer import sink_gradient
from torchtrain.exact_products import exact_products, has_tiles

CAUSAL = "anchorline::causal_attention"


class _Call(NamedTuple):
    """One causal call of the kernel: which blocks, and which tokens of each."""

    queries: tuple[slice, slice]
    keys: tuple[slice, slice]
    backwards: bool


_EVERY = slice(None)
_OWN_BLOCK = _Call((_EVERY, _EVERY), (_EVERY, _EVERY), backwards=False)
_BLOCK_BEFORE = _Call((slice(1, None), slice(None, -1)), (slice(None, -1), slice(1, None)), backwards=True)


def _calls(q: Tensor) -> tuple[_Call, ...]:
    more = q.shape[2] > 1 and q.shape[3] > 1
    return (_OWN_BLOCK, _BLOCK_BEFORE) if more else (_OWN_BLOCK,)


def _cut(x: Tensor, window: int) -> Tensor:
    """Cut [B, H, n, ..] into blocks [B, H, b, W, ..]; zeros, which no token sees, fill up the last."""
    fill = -x.shape[2] % window
    padded = F.pad(x, (*(0, 0) * (x.ndim - 3), 0, fill)) if fill else x
    return padded.unflatten(2, (-1, window))


def _take(x: Tensor, at: tuple[slice, slice], backwards: bool) -> Tensor:
    """Return the tokens of a call [B b, H, W, ..] out of [B, H, b, W, ..]."""
    part = x[:, :, at[0], at[1]]
    return (part.flip(3) if backwards else part).transpose(1, 2).flatten(0, 1)


def _give(part: Tensor, batch: int, backwards: bool) -> Tensor:
    """Inverse of `_take`: [B, H, b, W, ..] in storage order."""
    part = part.unflatten(0, (batch, -1)).transpose(1, 2)
    return part.flip(3) if backwards else part


@torch.library.custom_op(CAUSAL, mutates_args=())
def _attend_causally(
    q_BHnD: Tensor, k_BKnD: Tensor, v_BKnD: Tensor, scale: float, sinks_H: Tensor | None, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return out in the dtype of q and the log-sum-exp: one operation, so that both can be kept as they are."""
    B, _, n, _ = q_BHnD.shape
    plain = sinks_H is None and window is None
    tiles = plain and q_BHnD.dtype == torch.bfloat16 and has_tiles()
    dtype = torch.bfloat16 if tiles else torch.promote_types(q_BHnD.dtype, torch.float32)
    q, k, v = (_cut(x.to(dtype), window or n) for x in (q_BHnD, k_BKnD, v_BKnD))
    out, lse = q, q
    for queries, keys, backwards in _calls(q):
        tensors = (_take(x, at, backwards) for x, at in ((q, queries), (k, keys), (v, keys)))
        with exact_products(n if window is None else window):
            results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*tensors, is_causal=True, scale=scale)
        out_here, lse_here = (_give(x, B, backwards) for x in results)
        if not backwards:
            out, lse = out_here, lse_here
            continue
        out_before, lse_before = (x[:, :, queries[0], queries[1]] for x in (out, lse))
        total = torch.logaddexp(lse_before, lse_here)
        out_before.copy_(
            out_before * (lse_before - total).exp()[..., None] + out_here * (lse_here - total).exp()[..., None]
        )
        lse_before.copy_(total)
    out_BHnD, lse_BHn = (x.flatten(2, 3)[:, :, :n] for x in (out, lse))
    if sinks_H is not None:
        total_BHn = torch.logaddexp(lse_BHn, sinks_H.to(lse_BHn.dtype)[:, None])
        out_BHnD, lse_BHn = out_BHnD * (lse_BHn - total_BHn).exp()[..., None], total_BHn
    return out_BHnD.to(q_BHnD.dtype), lse_BHn


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        q_BHnD: Tensor,
        k_BKnD: Tensor,
        v_BKnD: Tensor,
        scale: float,
        sinks_H: Tensor | None,
        window: int | None,
    ) -> Tensor:
        out_BHnD, lse_BHn = _attend_causally(q_BHnD, k_BKnD, v_BKnD, scale, sinks_H, window)
        ctx.save_for_backward(q_BHnD, k_BKnD, v_BKnD, out_BHnD, lse_BHn, *([] if sinks_H is None else [sinks_H]))
        ctx.scale, ctx.window = scale, window  # type: ignore[attr-defined]
        return out_BHnD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BHnD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_BHnD, k_BKnD, v_BKnD, out_BHnD, lse_BHn, *sinks = ctx.saved_tensors  # which may be read once
        B, _, n, _ = grad_BHnD.shape
        window = ctx.window or n
        wide = [x.to(lse_BHn.dtype) for x in (grad_BHnD, q_BHnD, k_BKnD, v_BKnD, out_BHnD)]
        grad, q, k, v, out, lse = (_cut(x, window) for x in (*wide, lse_BHn))
        gradients: list[Tensor] = []
        for queries, keys, backwards in _calls(q):
            at = (queries, queries, keys, keys, queries, queries)
            taken = (_take(x, where, backwards) for x, where in zip((grad, q, k, v, out, lse), at, strict=True))
            with exact_products(window):
                results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *taken, 0.0, True, scale=ctx.scale
                )
            here = [_give(x, B, backwards) for x in results]
            if not backwards:
                gradients = here
                continue
            for total, x, (blocks, tokens) in zip(gradients, here, (queries, keys, keys), strict=True):
                total[:, :, blocks, tokens] += x
        qkv = (x.flatten(2, 3)[:, :, :n].to(grad_BHnD.dtype) for x in gradients)
        dsinks_H = None
        if sinks:
            grad, out, total = (x.transpose(1, 2) for x in (wide[0], wide[4], lse_BHn))
            dsinks_H = sink_gradient(grad, out, total, sinks[0])
        return *qkv, None, dsinks_H, None


def attend_on_cpu(
    q_BHnD: Tensor,
    k_BKnD: Tensor,
    v_BKnD: Tensor,
    scale: float,
    sinks_H: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    """Return out [B, H, n, D]: each query sees the keys up to its own, or of those the last `window`."""
    if window is not None and window >= q_BHnD.shape[2]:
        window = None
    return _CausalAttention.apply(q_BHnD, k_BKnD, v_BKnD, scale, sinks_H, window)  # type: ignore[return-value]
