"""Attention written out, with every rounding by name: dense, and the same by blocks of queries for long rows.

`attention` and `_eager` are the whole computation. A first reader may skip `_by_blocks`, which computes the same in
less memory, and `_flash`, FlashAttention-2's order of operations with its own backward pass.

Legend: B batch · T tokens of a row · Q queries of a block · H query heads · K key/value heads · G query heads per
key/value head · D head_dim · E head_dim of values, where it is another.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import Precision

from jaxref.mask import ANCHOR, PADDING, visible
from jaxref.rounding import ACCUMULATED, Rounding, cut_to


def attention(
    q_BTHD: Any,
    k_BTKD: Any,
    v_BTKE: Any,
    document_ids_BT: Any,
    rounding: Rounding,
    scale: float | None = None,
    query_block: int | None = None,
    sinks_H: Any = None,
    softcap: float | None = None,
    window: int | None = None,
    keep_anchor: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax attention under the mask rule.

    q_BTHD: queries, rotated, any float [B, T, H, D]; cast to the carrier, as k and v are.
    k_BTKD: keys, rotated, [B, T, K, D]; H is a multiple of K and query head h reads key/value head h // (H / K).
    v_BTKE: values [B, T, K, E]. E is D, or less in multi-head latent attention.
    document_ids_BT: integers [B, T]: 0 anchor, 1.. documents, -1 padding.
    rounding: which sites are rounded (`kv_heads`, `qk`, `scaled`, `probs`, `pv`, `attn_out`) and where the sum is
        divided out.
    scale: factor on the logits; default D ** -0.5.
    query_block: queries at a time; None is all at once. Memory is B H query_block T, and the backward pass
        recomputes each block.
    sinks_H: for each query head one more logit of its softmax, which no value follows (gpt-oss); cast to the
        carrier. The log-sum-exp counts it.
    softcap: each scaled logit x becomes softcap * tanh(x / softcap) (Gemma 2), rounded at `scaled` after each step.
    window, keep_anchor: see `jaxref.mask`.
    Returns out [B, T, H, E] and the log-sum-exp of the logits [B, H, T], both in the carrier. A query that sees nothing
    (padding) has output 0, log-sum-exp -inf and no gradient.

    Raises ValueError: shapes that do not fit each other, a query_block that is not positive.
    """
    q_BTHD, k_BTKD, v_BTKE = (jnp.asarray(x).astype(rounding.dtype) for x in (q_BTHD, k_BTKD, v_BTKE))
    document_BT = jnp.asarray(document_ids_BT)
    _check(q_BTHD, k_BTKD, v_BTKE, document_BT)
    # What padding holds reaches nothing, forward or backward: 0 times NaN, which a mask makes, is NaN.
    real_BT11 = (document_BT != PADDING)[:, :, None, None]
    q_BTHD, k_BTKD, v_BTKE = (jnp.where(real_BT11, x, 0) for x in (q_BTHD, k_BTKD, v_BTKE))
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    factor: float = D**-0.5 if scale is None else scale
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    # One copy of k and v per query head: the same numbers forward; backward, each head's share is rounded before the
    # sum.
    k_BTKGD, v_BTKGE = (
        rounding.round("kv_heads", jnp.broadcast_to(x[:, :, :, None], (*q_BTKGD.shape[:4], x.shape[3])))
        for x in (k_BTKD, v_BTKE)
    )
    sinks_KG = None if sinks_H is None else jnp.asarray(sinks_H).astype(rounding.dtype).reshape(K, H // K)
    index_BT = jnp.broadcast_to(jnp.arange(T), (B, T)) if window is None else _places(document_BT)

    def attend(q_BQKGD: jax.Array, document_BQ: jax.Array, index_BQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        documents = document_BQ[:, :, None], document_BT[:, None, :]
        mask_BQT = visible(*documents, index_BQ[:, :, None], index_BT[:, None, :], window, keep_anchor)
        return attend_under(
            mask_BQT[:, None, None], q_BQKGD, k_BTKGD, v_BTKGE, rounding, factor, sinks_KG=sinks_KG, softcap=softcap
        )

    if query_block is None:
        out_BKGTE, lse_BKGT = attend(q_BTKGD, document_BT, index_BT)
    else:
        out_BKGTE, lse_BKGT = _by_blocks(attend, q_BTKGD, document_BT, index_BT, query_block)
    out_BTHE = out_BKGTE.transpose(0, 3, 1, 2, 4).reshape(B, T, H, -1)
    return jnp.where(real_BT11, out_BTHE, 0), lse_BKGT.reshape(B, H, T)


def _places(document_BT: jax.Array) -> jax.Array:
    """Compute `jaxref.mask.places` where ids are traced: sorted by document, a token's index less its document's."""
    order_BT = jnp.argsort(document_BT, axis=1, stable=True)
    sorted_BT = jnp.take_along_axis(document_BT, order_BT, axis=1)
    within_BT = jnp.arange(document_BT.shape[1]) - jax.vmap(jnp.searchsorted)(sorted_BT, sorted_BT)
    anchors_B1 = (document_BT == ANCHOR).sum(1, keepdims=True)
    place_BT = within_BT + jnp.where(sorted_BT > ANCHOR, anchors_B1, 0)
    return jnp.take_along_axis(place_BT, jnp.argsort(order_BT, axis=1), axis=1)


def attend_under(
    mask: jax.Array,
    q_BQKGD: jax.Array,
    k_BTKGD: jax.Array,
    v_BTKGE: jax.Array,
    rounding: Rounding,
    scale: float,
    sinks_KG: jax.Array | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute attention under any bool `mask` that broadcasts to [B, K, G, Q, T], as `rounding.normalise` orders it:
    out [B, K, G, Q, E] and its log-sum-exp.
    """
    algorithm = _flash if rounding.normalise == "after_pv" else _eager
    return algorithm(q_BQKGD, k_BTKGD, v_BTKGE, sinks_KG, mask, rounding, scale, softcap)


def _by_blocks(
    attend: Callable[..., tuple[jax.Array, jax.Array]],
    q_BTKGD: jax.Array,
    document_BT: jax.Array,
    index_BT: jax.Array,
    query_block: int,
) -> tuple[jax.Array, jax.Array]:
    """Attend with `query_block` queries at a time. The backward pass recomputes each block."""
    if query_block < 1:
        raise ValueError(f"query_block: {query_block} queries at a time; give a positive number")
    B, T, K, G, D = q_BTKGD.shape
    n = -(-T // query_block)
    fill = n * query_block - T  # queries of padding, which see nothing, fill the last block
    q = jnp.pad(q_BTKGD, ((0, 0), (0, fill), (0, 0), (0, 0), (0, 0)))
    q_nBQKGD = q.reshape(B, n, query_block, K, G, D).swapaxes(0, 1)
    document_nBQ, index_nBQ = (
        jnp.pad(x, ((0, 0), (0, fill)), constant_values=-1).reshape(B, n, query_block).swapaxes(0, 1)
        for x in (document_BT, index_BT)
    )
    out, lse = lax.map(jax.checkpoint(lambda x: attend(*x)), (q_nBQKGD, document_nBQ, index_nBQ))
    out_BKGTE = jnp.moveaxis(out, 0, 3).reshape(B, K, G, n * query_block, -1)[:, :, :, :T]
    return out_BKGTE, jnp.moveaxis(lse, 0, 3).reshape(B, K, G, n * query_block)[:, :, :, :T]


def masked_logits(
    q_BQKGD: jax.Array,
    k_BTKGD: jax.Array,
    mask: jax.Array,
    rounding: Rounding,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Return scaled, capped logits [B, K, G, Q, T] in the carrier, -inf where the bool `mask` (broadcast) is false."""
    qk_BKGQT = rounding.round("qk", _accumulate("bqkgd,btkgd->bkgqt", q_BQKGD, k_BTKGD, (4, 4), rounding))
    return jnp.where(mask, _scale(qk_BKGQT, rounding, scale, softcap)[0], -jnp.inf)


def _scale(
    qk_BKGQT: jax.Array, rounding: Rounding, scale: float, softcap: float | None
) -> tuple[jax.Array, jax.Array | float]:
    """Return the logits, and their derivative by what is capped."""
    scaled = rounding.round("scaled", qk_BKGQT * scale)
    if softcap is None:
        return scaled, 1.0
    share = rounding.round("scaled", jnp.tanh(rounding.round("scaled", scaled / softcap)))
    return rounding.round("scaled", share * softcap), 1 - share * share


def softmax_parts(
    logits: jax.Array, mask: jax.Array, sinks_KG: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return exp(logit - max) [B, K, G, Q, T], its sum and the log-sum-exp [B, K, G, Q] of masked logits and the sink.

    A row that sees nothing: its maximum is put to 0 and its sum to 1, so that nothing is -inf - -inf or 0 / 0.
    """
    sees, top = mask.any(-1), logits.max(-1)
    if sinks_KG is not None:
        top = jnp.maximum(top, sinks_KG[:, :, None])
    top = lax.stop_gradient(jnp.where(sees, top, 0.0))
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    if sinks_KG is not None:
        total = total + jnp.exp(sinks_KG[:, :, None] - top)
    total = jnp.where(sees, total, 1.0)
    return weights, total, jnp.where(sees, top + jnp.log(total), -jnp.inf)


def _eager(
    q_BQKGD: jax.Array,
    k_BTKGD: jax.Array,
    v_BTKGE: jax.Array,
    sinks_KG: jax.Array | None,
    mask: jax.Array,
    rounding: Rounding,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Compute softmax, then P V; the backward pass is JAX's own."""
    logits = masked_logits(q_BQKGD, k_BTKGD, mask, rounding, scale, softcap)
    weights, total, lse_BKGQ = softmax_parts(logits, mask, sinks_KG)
    probs = rounding.round("probs", weights / total[..., None])
    pv_BKGQE = rounding.round("pv", _accumulate("bkgqt,btkgd->bkgqd", probs, v_BTKGE, (4, 1), rounding))
    return rounding.round("attn_out", pv_BKGQE), lse_BKGQ


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _flash(
    q_BQKGD: jax.Array,
    k_BTKGD: jax.Array,
    v_BTKGE: jax.Array,
    sinks_KG: jax.Array | None,
    mask: jax.Array,
    rounding: Rounding,
    scale: float,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """FlashAttention-2's forward pass (arXiv 2307.08691, algorithm 1): exp(logit - max) V over its sum, at the end."""
    logits = masked_logits(q_BQKGD, k_BTKGD, mask, rounding, scale, softcap)
    weights, total, lse_BKGQ = softmax_parts(logits, mask, sinks_KG)
    weights = rounding.round("probs", weights)
    pv_BKGQE = rounding.round("pv", _accumulate("bkgqt,btkgd->bkgqd", weights, v_BTKGE, (4, 1), rounding))
    return rounding.round("attn_out", pv_BKGQE / total[..., None]), lse_BKGQ


def _flash_forward(*arguments: Any) -> Any:
    results: Any = _flash(*arguments)
    return results, (*arguments[:5], *results)


def _flash_backward(rounding: Rounding, scale: float, softcap: float | None, saved: Any, cotangents: Any) -> Any:
    """Compute FlashAttention-2's backward pass (algorithm 2), which is not its forward transposed.

    P is recomputed from the log-sum-exp; sum_t P dP is taken as the product of the output, rounded as it was stored,
    with its gradient; P and dS are rounded (both at `probs`) for the products that follow.
    """
    q_BQKGD, k_BTKGD, v_BTKGE, sinks_KG, mask, out_BKGQE, lse_BKGQ = saved
    dout_BKGQE, dlse_BKGQ = cotangents
    dout_BKGQE = rounding.round("attn_out", dout_BKGQE)
    qk_BKGQT = rounding.round("qk", _einsum("bqkgd,btkgd->bkgqt", q_BQKGD, k_BTKGD))
    logits, slope = _scale(qk_BKGQT, rounding, scale, softcap)
    sees = mask.any(-1)
    finite_lse = jnp.where(sees, lse_BKGQ, 0.0)
    p_BKGQT = jnp.where(mask, jnp.exp(logits - finite_lse[..., None]), 0.0)
    dp_BKGQT = _einsum("bkgqd,btkgd->bkgqt", dout_BKGQE, v_BTKGE)
    delta_BKGQ = (out_BKGQE * dout_BKGQE).sum(-1) - dlse_BKGQ
    ds_BKGQT = rounding.round("probs", p_BKGQT * (dp_BKGQT - delta_BKGQ[..., None]) * slope)
    dq_BQKGD = _einsum("bkgqt,btkgd->bqkgd", ds_BKGQT, k_BTKGD) * scale
    dk_BTKGD = _einsum("bkgqt,bqkgd->btkgd", ds_BKGQT, q_BQKGD) * scale
    dv_BTKGE = _einsum("bkgqt,bkgqd->btkgd", rounding.round("probs", p_BKGQT), dout_BKGQE)
    dsinks_KG = None
    if sinks_KG is not None:
        p_sink_BKGQ = jnp.where(sees, jnp.exp(sinks_KG[:, :, None] - finite_lse), 0.0)
        dsinks_KG = -(p_sink_BKGQ * delta_BKGQ).sum((0, 3))
    return dq_BQKGD, dk_BTKGD, dv_BTKGE, dsinks_KG, None


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


def _check(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKE: jax.Array, document_ids_BT: jax.Array) -> None:
    shapes = f"q {q_BTHD.shape}, k {k_BTKD.shape}, v {v_BTKE.shape}, document_ids {document_ids_BT.shape}"
    if not q_BTHD.ndim == k_BTKD.ndim == v_BTKE.ndim == 4 or k_BTKD.shape[:3] != v_BTKE.shape[:3]:
        raise ValueError(f"attention: expected q [B, T, H, D] and k, v [B, T, K, D]; got {shapes}")
    B, T, H, D = q_BTHD.shape
    if k_BTKD.shape[:2] != (B, T) or k_BTKD.shape[3] != D or H % k_BTKD.shape[2] or document_ids_BT.shape != (B, T):
        raise ValueError(f"attention: B, T and D must be shared and H be a multiple of K; got {shapes}")
