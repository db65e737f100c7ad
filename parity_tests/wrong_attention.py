"""What wrong attention looks like: mistakes that are made again and again, computed on purpose in float64.

`parity check` holds them against what a function gives, the gate against what a model's layer gives.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxref.mask import ANCHOR, PADDING, visible_BQJ

Arrays = dict[str, Any]  # of JAX, so that a mistake has its gradients too


@dataclass(frozen=True)
class AttentionInputs:
    """Everything attention depends on; a mistake changes one field."""

    q_BHTD: jax.Array
    k_BHTD: jax.Array  # one copy for each query head
    v_BHTD: jax.Array
    mask_BTT: np.ndarray
    scale: float


def attention_on(
    q_BTHD: np.ndarray,
    k_BTKD: np.ndarray,
    v_BTKD: np.ndarray,
    document_ids_BT: np.ndarray,
    scale: float | None = None,
    order: str = "grouped",
) -> AttentionInputs:
    """Return what right attention depends on, in float64.

    Args:
        scale: default D ** -0.5.
        order: which key/value head a query head reads: `grouped` (right), `interleaved` or `first` (wrong).
    """
    q, k, v = (jnp.asarray(x, jnp.float64).swapaxes(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    H, K = q.shape[1], k.shape[1]
    head_H = {"grouped": np.arange(H) // (H // K), "interleaved": np.arange(H) % K, "first": np.zeros(H, int)}[order]
    factor = q.shape[3] ** -0.5 if scale is None else scale
    return AttentionInputs(q, k[:, head_H], v[:, head_H], visible_BQJ(document_ids_BT), factor)


def softmax(attention: AttentionInputs) -> tuple[Any, Any]:
    """Probabilities [B, H, T, T] and log-sum-exp [B, H, T]; 0 and -inf where nothing is seen."""
    logits = attention.q_BHTD @ attention.k_BHTD.swapaxes(2, 3) * attention.scale
    logits = jnp.where(attention.mask_BTT[:, None], logits, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(-1, keepdims=True, initial=-jnp.inf))
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0), (top + jnp.log(total))[..., 0]


def forward(attention: AttentionInputs) -> Arrays:
    """`out` [B, T, H, D] and `lse` [B, H, T]."""
    p, lse = softmax(attention)
    return {"out": (p @ attention.v_BHTD).swapaxes(1, 2), "lse": lse}


# q [B, T, H, D], k and v [B, T, K, D] -> `out`, and `lse` where the mistake changes it in a known way.
WrongPass = Callable[[Any, Any, Any], Arrays]


def wrong_passes(document_ids_BT: np.ndarray, scale: float) -> Iterator[tuple[str, WrongPass]]:
    """Words of every wrong forward pass, and a differentiable function that computes it in float64.

    Where a mistake makes no difference (heads in another order where there is one head, say) it gives the right result.
    """

    def inputs(q: Any, k: Any, v: Any, order: str = "grouped") -> AttentionInputs:
        return attention_on(q, k, v, document_ids_BT, scale, order)

    for words, mask in wrong_masks(document_ids_BT):
        yield words, lambda q, k, v, mask=mask: forward(replace(inputs(q, k, v), mask_BTT=mask))
    for words, wrong in (
        ("the softmax scale is missing (1 where it should be head_dim ** -0.5)", lambda default: 1.0),
        ("the scale that is passed is ignored", lambda default: default),
        ("the scale is applied twice", lambda default: scale**2),
        ("exp2 without the factor log2(e)", lambda default: scale * np.log(2.0)),
    ):
        yield words, lambda q, k, v, wrong=wrong: forward(replace(inputs(q, k, v), scale=wrong(q.shape[3] ** -0.5)))
    yield (
        "GQA heads in the wrong order: query head h reads key/value head h % K, not h // (H / K)",
        lambda q, k, v: forward(inputs(q, k, v, "interleaved")),
    )
    yield "every query head reads key/value head 0", lambda q, k, v: forward(inputs(q, k, v, "first"))
    yield (
        "all heads are given out in another order (interleaved with the groups)",
        lambda q, k, v: _reorder(inputs(q, k, v), k.shape[2]),
    )
    yield "k is used in place of v", lambda q, k, v: forward(inputs(q, k, k))
    yield "k and v are swapped", lambda q, k, v: forward(inputs(q, v, k))
    yield "the softmax is not normalised", lambda q, k, v: _leave_unnormalised(inputs(q, k, v))
    yield "the softmax is taken over the queries", lambda q, k, v: _over_queries(inputs(q, k, v))
    yield "the output is all zeros", lambda q, k, v: {"out": jnp.zeros_like(q, dtype=jnp.float64)}


def _reorder(right: AttentionInputs, kv_heads: int) -> Arrays:
    H = right.q_BHTD.shape[1]
    order = np.arange(H).reshape(kv_heads, H // kv_heads).T.reshape(-1)
    grouped = forward(right)
    return {"out": grouped["out"][:, :, order], "lse": grouped["lse"][:, order]}


def _leave_unnormalised(right: AttentionInputs) -> Arrays:
    p, lse = softmax(right)
    return {"out": (p * jnp.exp(lse)[..., None] @ right.v_BHTD).swapaxes(1, 2)}


def _over_queries(right: AttentionInputs) -> Arrays:
    logits = jnp.where(right.mask_BTT[:, None], right.q_BHTD @ right.k_BHTD.swapaxes(2, 3) * right.scale, -jnp.inf)
    top = jax.lax.stop_gradient(logits.max(initial=0.0, where=jnp.isfinite(logits)))
    weights = jnp.exp(logits - top)
    total = weights.sum(2, keepdims=True)
    return {"out": (weights / jnp.where(total > 0, total, 1.0) @ right.v_BHTD).swapaxes(1, 2)}


def wrong_masks(ids: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Words and bool [B, T, T] of every wrong mask of document ids [B, T]."""
    T = ids.shape[1]
    true, causal = visible_BQJ(ids), np.tri(T, dtype=bool)
    real_q, real_k = ids[:, :, None] != PADDING, ids[:, None, :] != PADDING
    same = ids[:, :, None] == ids[:, None, :]
    anchor_k = ids[:, None, :] == ANCHOR
    beyond = ids[:, :, None] > ANCHOR
    yield "a leak: documents see one another (the causal mask only)", causal & real_q & real_k
    yield "documents and padding are ignored (the causal mask only)", np.broadcast_to(causal, true.shape)
    yield "the future is visible (documents without the causal mask)", (same | anchor_k) & real_q & real_k
    yield "no mask at all", np.ones_like(true)
    yield "a token does not see itself (k < q where it should be k <= q)", true & ~np.eye(T, dtype=bool)
    yield "a missing anchor: documents see only themselves", true & same
    first = beyond & (ids[:, :, None] == np.where(ids > ANCHOR, ids, np.iinfo(ids.dtype).max).min(1)[:, None, None])
    yield "only the first document sees the anchor", true & (same | first)
    yield "only the first anchor token is visible to documents", true & (same | (np.arange(T) == 0))
    yield (
        "the anchor is repeated at the documents' own end: its last token is missing",
        true & (same | (anchor_k & ~_last(anchor_k))),
    )
    yield "top-left alignment: query i of a document sees its first i + 1 keys, anchor included", _top_left(ids)
    yield "padding is visible as a key", (same | anchor_k | ~real_k) & causal & real_q
    yield "padding is treated as one more document", (same | anchor_k) & causal
    yield "padding queries are not put to zero: they attend to padding", (same & causal) | true
    yield "documents begin one token late", visible_BQJ(_shift(ids, 1))
    yield "documents begin one token early", visible_BQJ(_shift(ids, -1))
    yield "the batch shares the documents of its first row", np.broadcast_to(true[:1], true.shape)
    yield (
        "the first key of each document is missing",
        true & ~(same & _first_of_run(ids)[:, None, :] & ~np.eye(T, dtype=bool)),
    )


def _last(anchor_B1T: np.ndarray) -> np.ndarray:
    return np.arange(anchor_B1T.shape[-1]) == anchor_B1T.sum(-1, keepdims=True) - 1


def _shift(ids: np.ndarray, by: int) -> np.ndarray:
    """Boundaries between documents moved; where the anchor and the padding lie stays."""
    moved = np.roll(ids, by, axis=1)
    keep = (ids <= ANCHOR) | (moved <= ANCHOR)
    moved[:, 0 if by > 0 else -1] = ids[:, 0 if by > 0 else -1]
    return np.where(keep, ids, moved)


def _first_of_run(ids: np.ndarray) -> np.ndarray:
    before = np.concatenate([np.full((len(ids), 1), PADDING), ids[:, :-1]], axis=1)
    return (ids != before) & (ids > ANCHOR)


def _top_left(ids: np.ndarray) -> np.ndarray:
    mask = np.zeros((*ids.shape, ids.shape[1]), dtype=bool)
    for row, documents in enumerate(ids):
        anchor = np.flatnonzero(documents == ANCHOR)
        for document in np.unique(documents[documents != PADDING]):
            own = np.flatnonzero(documents == document)
            keys = own if document == ANCHOR else np.concatenate([anchor, own])
            for i, query in enumerate(own):
                mask[row, query, keys[: i + 1]] = True
    return mask
