"""Attention written out, with every rounding by name: dense, and the same by blocks of queries for long rows.

Legend: B batch · T tokens of a row · Q queries of a block · H query heads · K key/value heads · G query heads per key/value
head · D head_dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import Precision

from jaxref.mask import rule
from jaxref.rounding import Rounding


def attention(
    q_BTHD: Any,
    k_BTKD: Any,
    v_BTKD: Any,
    document_ids_BT: Any,
    rounding: Rounding,
    scale: float | None = None,
    block: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention under the mask rule.

    Args:
        q_BTHD: queries, rotated, any float [B, T, H, D]; taken into the carrier as they are.
        k_BTKD: keys, rotated, [B, T, K, D]; H is a multiple of K and query head h reads key/value head h // (H / K).
        v_BTKD: values [B, T, K, D].
        document_ids_BT: integers [B, T]: 0 anchor, 1.. documents, -1 padding.
        rounding: which sites are rounded (`qk`, `scaled`, `probs`, `pv`, `attn_out`) and where the sum is divided out.
        scale: factor on the logits; default D ** -0.5.
        block: queries at a time; None is all at once. Memory is B H block T, and the backward pass recomputes each block.

    Returns:
        out [B, T, H, D] and the log-sum-exp of the logits [B, H, T], both in the carrier. A query that sees nothing
        (padding) has output 0, log-sum-exp -inf and no gradient.

    Raises ValueError: shapes that do not fit each other, a block that is not positive.
    """
    q_BTHD, k_BTKD, v_BTKD = (jnp.asarray(x).astype(rounding.dtype) for x in (q_BTHD, k_BTKD, v_BTKD))
    document_ids_BT = jnp.asarray(document_ids_BT)
    _check(q_BTHD, k_BTKD, v_BTKD, document_ids_BT)
    B, T, H, D = q_BTHD.shape
    scale = D**-0.5 if scale is None else scale
    attend = partial(_attend, k_BTKD=k_BTKD, v_BTKD=v_BTKD, document_BT=document_ids_BT, rounding=rounding, scale=scale)
    if block is None:
        return attend(q_BTHD, document_ids_BT, jnp.arange(T))
    if block < 1:
        raise ValueError(f"block: {block} queries at a time; give a positive number")

    # Queries added to fill the last block are padding: they see nothing.
    n = -(-T // block)
    fill = n * block - T
    q_nBQHD = jnp.pad(q_BTHD, ((0, 0), (0, fill), (0, 0), (0, 0))).reshape(B, n, block, H, D).swapaxes(0, 1)
    document_nBQ = jnp.pad(document_ids_BT, ((0, 0), (0, fill)), constant_values=-1).reshape(B, n, block).swapaxes(0, 1)
    index_nQ = jnp.arange(n * block).reshape(n, block)
    # One block after the other, each made anew in the backward pass.
    out_nBQHD, lse_nBHQ = lax.map(jax.checkpoint(lambda x: attend(*x)), (q_nBQHD, document_nBQ, index_nQ))
    out_BTHD = out_nBQHD.swapaxes(0, 1).reshape(B, n * block, H, D)[:, :T]
    lse_BHT = jnp.moveaxis(lse_nBHQ, 0, 2).reshape(B, H, n * block)[:, :, :T]
    return out_BTHD, lse_BHT


def _attend(
    q_BQHD: jax.Array,
    document_BQ: jax.Array,
    index_Q: jax.Array,
    *,
    k_BTKD: jax.Array,
    v_BTKD: jax.Array,
    document_BT: jax.Array,
    rounding: Rounding,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    B, Q, H, D = q_BQHD.shape
    K, T = k_BTKD.shape[2], k_BTKD.shape[1]
    q_BQKGD = q_BQHD.reshape(B, Q, K, H // K, D)
    mask_BQT = rule(
        document_BQ[:, :, None], document_BT[:, None, :], index_Q[None, :, None], jnp.arange(T)[None, None, :]
    )
    mask = mask_BQT[:, None, None]  # over K and G
    sees = mask.any(-1)

    qk_BKGQT = jnp.einsum("bqkgd,btkd->bkgqt", q_BQKGD, k_BTKD, precision=Precision.HIGHEST)
    logits = rounding.round("scaled", rounding.round("qk", qk_BKGQT) * scale)

    # A row that sees nothing: its maximum is put to 0 and its sum to 1, so that nothing is -inf - -inf or 0 / 0.
    masked = jnp.where(mask, logits, -jnp.inf)
    top = lax.stop_gradient(jnp.where(sees, masked.max(-1), 0.0))
    weights = jnp.exp(masked - top[..., None])
    total = jnp.where(sees, weights.sum(-1), 1.0)
    lse_BKGQ = jnp.where(sees, top + jnp.log(total), -jnp.inf)

    before = rounding.normalise == "before_pv"
    probs = rounding.round("probs", weights / total[..., None] if before else weights)
    pv = rounding.round("pv", jnp.einsum("bkgqt,btkd->bkgqd", probs, v_BTKD, precision=Precision.HIGHEST))
    out_BKGQD = rounding.round("attn_out", pv if before else pv / total[..., None])
    return out_BKGQD.transpose(0, 3, 1, 2, 4).reshape(B, Q, H, D), lse_BKGQ.reshape(B, H, Q)


def _check(q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, document_ids_BT: jax.Array) -> None:
    shapes = f"q {q_BTHD.shape}, k {k_BTKD.shape}, v {v_BTKD.shape}, document_ids {document_ids_BT.shape}"
    if not q_BTHD.ndim == k_BTKD.ndim == v_BTKD.ndim == 4 or k_BTKD.shape != v_BTKD.shape:
        raise ValueError(f"attention: expected q [B, T, H, D] and k, v [B, T, K, D]; got {shapes}")
    B, T, H, D = q_BTHD.shape
    if k_BTKD.shape[:2] != (B, T) or k_BTKD.shape[3] != D or H % k_BTKD.shape[2] or document_ids_BT.shape != (B, T):
        raise ValueError(f"attention: B, T and D must be shared and H be a multiple of K; got {shapes}")
