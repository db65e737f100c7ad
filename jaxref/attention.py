"""Attention written out, with every rounding by name: dense, and the same by blocks of queries for long rows.

`attention` and `_eager` are the whole computation. A first reader may skip `_by_blocks`, which computes the same in
less memory, and `_flash`, FlashAttention-2's order of operations with its own backward pass.

Legend: B batch · T tokens of a row · Q queries of a block · H query heads · K key/value heads · G query heads per
key/value head · D head_dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import Precision

from jaxref.mask import visible
from jaxref.rounding import ACCUMULATED, Rounding, cut_to


def attention(
    q_BTHD: Any,
    k_BTKD: Any,
    v_BTKD: Any,
    document_ids_BT: Any,
    rounding: Rounding,
    scale: float | None = None,
    query_block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax attention under the mask rule.

    Args:
        q_BTHD: queries, rotated, any float [B, T, H, D]; cast to the carrier, as k and v are.
        k_BTKD: keys, rotated, [B, T, K, D]; H is a multiple of K and query head h reads key/value head h // (H / K).
        v_BTKD: values [B, T, K, D].
        document_ids_BT: integers [B, T]: 0 anchor, 1.. documents, -1 padding.
        rounding: which sites are rounded (`kv_heads`, `qk`, `scaled`, `probs`, `pv`, `attn_out`) and where the sum is
            divided out.
        scale: factor on the logits; default D ** -0.5.
        query_block: queries at a time; None is all at once. Memory is B H query_block T, and the backward pass
            recomputes each block.

    Returns:
        out [B, T, H, D] and the log-sum-exp of the logits [B, H, T], both in the carrier. A query that sees nothing
        (padding) has output 0, log-sum-exp -inf and no gradient.

    Raises ValueError: shapes that do not fit each other, a query_block that is not positive.
    """
    q_BTHD, k_BTKD, v_BTKD = (jnp.asarray(x).astype(rounding.dtype) for x in (q_BTHD, k_BTKD, v_BTKD))
    document_BT = jnp.asarray(document_ids_BT)
    _check(q_BTHD, k_BTKD, v_BTKD, document_BT)
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    factor: float = D**-0.5 if scale is None else scale
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    # One copy of k and v per query head: the same numbers forward; backward, each head's share is rounded before the
    # sum.
    k_BTKGD, v_BTKGD = (
        rounding.round("kv_heads", jnp.broadcast_to(x[:, :, :, None], q_BTKGD.shape)) for x in (k_BTKD, v_BTKD)
    )

    def attend(q_BQKGD: jax.Array, document_BQ: jax.Array, index_Q: jax.Array) -> tuple[jax.Array, jax.Array]:
        index_T = jnp.arange(T)
        mask_BQT = visible(
            document_BQ[:, :, None], document_BT[:, None, :], index_Q[None, :, None], index_T[None, None, :]
        )
        return attend_under(mask_BQT[:, None, None], q_BQKGD, k_BTKGD, v_BTKGD, rounding, factor)

    if query_block is None:
        out_BKGTD, lse_BKGT = attend(q_BTKGD, document_BT, jnp.arange(T))
    else:
        out_BKGTD, lse_BKGT = _by_blocks(attend, q_BTKGD, document_BT, query_block)
    return out_BKGTD.transpose(0, 3, 1, 2, 4).reshape(B, T, H, D), lse_BKGT.reshape(B, H, T)


def attend_under(
    mask: jax.Array, q_BQKGD: jax.Array, k_BTKGD: jax.Array, v_BTKGD: jax.Array, rounding: Rounding, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Compute attention under any bool `mask` that broadcasts to [B, K, G, Q, T], as `rounding.normalise` orders it:
    out [B, K, G, Q, D] and its log-sum-exp.
    """
    algorithm = _flash if rounding.normalise == "after_pv" else _eager
    return algorithm(q_BQKGD, k_BTKGD, v_BTKGD, mask, rounding, scale)


def _by_blocks(
    attend: Callable[..., tuple[jax.Array, jax.Array]], q_BTKGD: jax.Array, document_BT: jax.Array, query_block: int
) -> tuple[jax.Array, jax.Array]:
    """Attend with `query_block` queries after the other, each made anew in the backward pass."""
    if query_block < 1:
        raise ValueError(f"query_block: {query_block} queries at a time; give a positive number")
    B, T, K, G, D = q_BTKGD.shape
    n = -(-T // query_block)
    fill = n * query_block - T  # queries of padding, which see nothing, fill the last block
    q = jnp.pad(q_BTKGD, ((0, 0), (0, fill), (0, 0), (0, 0), (0, 0)))
    q_nBQKGD = q.reshape(B, n, query_block, K, G, D).swapaxes(0, 1)
    document_nBQ = (
        jnp.pad(document_BT, ((0, 0), (0, fill)), constant_values=-1).reshape(B, n, query_block).swapaxes(0, 1)
    )
    index_nQ = jnp.arange(n * query_block).reshape(n, query_block)
    out, lse = lax.map(jax.checkpoint(lambda x: attend(*x)), (q_nBQKGD, document_nBQ, index_nQ))
    out_BKGTD = jnp.moveaxis(out, 0, 3).reshape(B, K, G, n * query_block, D)[:, :, :, :T]
    return out_BKGTD, jnp.moveaxis(lse, 0, 3).reshape(B, K, G, n * query_block)[:, :, :, :T]


def masked_logits(
    q_BQKGD: jax.Array, k_BTKGD: jax.Array, mask: jax.Array, rounding: Rounding, scale: float
) -> jax.Array:
    """Return scaled logits [B, K, G, Q, T] in the carrier, -inf where the bool `mask`, broadcastable to them, is
    false.
    """
    qk_BKGQT = rounding.round("qk", _accumulate("bqkgd,btkgd->bkgqt", q_BQKGD, k_BTKGD, (4, 4), rounding))
    return jnp.where(mask, rounding.round("scaled", qk_BKGQT * scale), -jnp.inf)


def softmax_parts(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(logit - max) [B, K, G, Q, T], its sum and the log-sum-exp [B, K, G, Q] of masked logits.

    A row that sees nothing: its maximum is put to 0 and its sum to 1, so that nothing is -inf - -inf or 0 / 0.
    """
    sees = mask.any(-1)
    top = lax.stop_gradient(jnp.where(sees, logits.max(-1), 0.0))
    weights = jnp.exp(logits - top[..., None])
    total = jnp.where(sees, weights.sum(-1), 1.0)
    return weights, total, jnp.where(sees, top + jnp.log(total), -jnp.inf)


def _eager(
    q_BQKGD: jax.Array, k_BTKGD: jax.Array, v_BTKGD: jax.Array, mask: jax.Array, rounding: Rounding, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax, then P V; the backward pass is JAX's own."""
    weights, total, lse_BKGQ = softmax_parts(masked_logits(q_BQKGD, k_BTKGD, mask, rounding, scale), mask)
    probs = rounding.round("probs", weights / total[..., None])
    pv_BKGQD = rounding.round("pv", _accumulate("bkgqt,btkgd->bkgqd", probs, v_BTKGD, (4, 1), rounding))
    return rounding.round("attn_out", pv_BKGQD), lse_BKGQ


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _flash(
    q_BQKGD: jax.Array, k_BTKGD: jax.Array, v_BTKGD: jax.Array, mask: jax.Array, rounding: Rounding, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Compute FlashAttention-2's forward pass (arXiv 2307.08691, algorithm 1): exp(logit - max) V, divided by the sum
    at the end.
    """
    weights, total, lse_BKGQ = softmax_parts(masked_logits(q_BQKGD, k_BTKGD, mask, rounding, scale), mask)
    weights = rounding.round("probs", weights)
    pv_BKGQD = rounding.round("pv", _accumulate("bkgqt,btkgd->bkgqd", weights, v_BTKGD, (4, 1), rounding))
    return rounding.round("attn_out", pv_BKGQD / total[..., None]), lse_BKGQ


def _flash_forward(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, rounding: Rounding, scale: float) -> Any:
    results: Any = _flash(q, k, v, mask, rounding, scale)
    return results, (q, k, v, mask, *results)


def _flash_backward(rounding: Rounding, scale: float, saved: Any, cotangents: Any) -> Any:
    """Compute FlashAttention-2's backward pass (algorithm 2), which is not its forward transposed.

    P is made anew from the log-sum-exp; sum_t P dP is taken as the product of the output, rounded as it was stored,
    with its gradient; P and dS are rounded (both at `probs`) for the products that follow.
    """
    q_BQKGD, k_BTKGD, v_BTKGD, mask, out_BKGQD, lse_BKGQ = saved
    dout_BKGQD, dlse_BKGQ = cotangents
    dout_BKGQD = rounding.round("attn_out", dout_BKGQD)
    logits = rounding.round("scaled", rounding.round("qk", _einsum("bqkgd,btkgd->bkgqt", q_BQKGD, k_BTKGD)) * scale)
    finite_lse = jnp.where(mask.any(-1), lse_BKGQ, 0.0)
    p_BKGQT = jnp.where(mask, jnp.exp(logits - finite_lse[..., None]), 0.0)
    dp_BKGQT = _einsum("bkgqd,btkgd->bkgqt", dout_BKGQD, v_BTKGD)
    delta_BKGQ = (out_BKGQD * dout_BKGQD).sum(-1) - dlse_BKGQ
    ds_BKGQT = rounding.round("probs", p_BKGQT * (dp_BKGQT - delta_BKGQ[..., None]))
    dq_BQKGD = _einsum("bkgqt,btkgd->bqkgd", ds_BKGQT, k_BTKGD) * scale
    dk_BTKGD = _einsum("bkgqt,bqkgd->btkgd", ds_BKGQT, q_BQKGD) * scale
    dv_BTKGD = _einsum("bkgqt,bkgqd->btkgd", rounding.round("probs", p_BKGQT), dout_BKGQD)
    return dq_BQKGD, dk_BTKGD, dv_BTKGD, None


_flash.defvjp(_flash_forward, _flash_backward)


def _accumulate(equation: str, x: jax.Array, y: jax.Array, axes: tuple[int, int], rounding: Rounding) -> jax.Array:
    """Return the product; where `rounding` has an accumulator, its running sum over the axes is cut step by step."""
    if rounding.accumulator is None:
        return _einsum(equation, x, y)
    bits, steps = rounding.accumulator, -(-x.shape[axes[0]] // ACCUMULATED)

    def split(array: jax.Array, axis: int) -> jax.Array:
        front = jnp.moveaxis(array, axis, 0)
        front = jnp.pad(front, [(0, steps * ACCUMULATED - len(front)), *[(0, 0)] * (front.ndim - 1)])
        return jnp.moveaxis(front.reshape(steps, ACCUMULATED, *front.shape[1:]), 1, axis + 1)

    x_steps, y_steps = split(x, axes[0]), split(y, axes[1])
    nothing = jnp.zeros(jax.eval_shape(partial(_einsum, equation), x_steps[0], y_steps[0]).shape, x.dtype)

    def step(total: jax.Array, terms: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return cut_to(total + _einsum(equation, *terms), bits), None

    return lax.scan(step, nothing, (x_steps, y_steps))[0]


def _einsum(equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, y, precision=Precision.HIGHEST)  # on a GPU, float32 would be TF32 without it


def _check(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, document_ids_BT: jax.Array) -> None:
    shapes = f"q {q_BTHD.shape}, k {k_BTKD.shape}, v {v_BTKD.shape}, document_ids {document_ids_BT.shape}"
    if not q_BTHD.ndim == k_BTKD.ndim == v_BTKD.ndim == 4 or k_BTKD.shape != v_BTKD.shape:
        raise ValueError(f"attention: expected q [B, T, H, D] and k, v [B, T, K, D]; got {shapes}")
    B, T, H, D = q_BTHD.shape
    if k_BTKD.shape[:2] != (B, T) or k_BTKD.shape[3] != D or H % k_BTKD.shape[2] or document_ids_BT.shape != (B, T):
        raise ValueError(f"attention: B, T and D must be shared and H be a multiple of K; got {shapes}")
