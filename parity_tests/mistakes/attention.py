"""Mistakes of attention, in float64: wrong forward passes, wrong log-sum-exps, wrong gradients.

numpy computes them. Where gradients are asked for, the same code runs on JAX's arrays, which have them.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · G query heads per key/value head · D head_dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxref.mask import ANCHOR, PADDING, visible_BQJ
from parity_tests.mistakes import Mistake

Arrays = dict[str, Any]


@dataclass(frozen=True)
class AttentionInputs:
    """Everything attention depends on; a mistake changes one field."""

    q_BHTD: Any
    k_BHTD: Any  # one copy for each query head
    v_BHTD: Any
    mask_BTT: np.ndarray
    scale: float


def attention_on(
    q_BTHD: Any, k_BTKD: Any, v_BTKD: Any, document_ids_BT: np.ndarray, scale: float, order: str = "grouped"
) -> AttentionInputs:
    """Return what right attention depends on, in float64.

    order: which key/value head a query head reads: `grouped` (right), `interleaved` or `first` (wrong).
    """
    q, k, v = (_float64(x).swapaxes(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD))
    H, K = q.shape[1], k.shape[1]
    head_H = {"grouped": np.arange(H) // (H // K), "interleaved": np.arange(H) % K, "first": np.zeros(H, int)}[order]
    return AttentionInputs(q, k[:, head_H], v[:, head_H], visible_BQJ(document_ids_BT), scale)


def softmax(attention: AttentionInputs) -> tuple[Any, Any]:
    """Probabilities [B, H, T, T] and log-sum-exp [B, H, T]; 0 and -inf where nothing is seen."""
    xp = attention.q_BHTD.__array_namespace__()
    logits = attention.q_BHTD @ attention.k_BHTD.swapaxes(2, 3) * attention.scale
    logits = xp.where(attention.mask_BTT[:, None], logits, -np.inf)
    top = _constant(logits.max(-1, keepdims=True, initial=-np.inf))
    weights = xp.exp(logits - xp.where(xp.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / xp.where(total > 0, total, 1.0), (top + xp.log(total))[..., 0]


def _float64(x: Any) -> Any:
    return x.astype(np.float64) if hasattr(x, "astype") else np.asarray(x, np.float64)


def _constant(x: Any) -> Any:
    """The same numbers without a gradient."""
    if isinstance(x, np.ndarray | np.generic):
        return x
    import jax

    return jax.lax.stop_gradient(x)


def forward(attention: AttentionInputs) -> Arrays:
    """`out` [B, T, H, D] and `lse` [B, H, T]."""
    p, lse = softmax(attention)
    return {"out": (p @ attention.v_BHTD).swapaxes(1, 2), "lse": lse}


# -- forward -----------------------------------------------------------------------------------------------------------


def forward_mistakes(
    q_BTHD: np.ndarray,
    k_BTKD: np.ndarray,
    v_BTKD: np.ndarray,
    document_ids_BT: np.ndarray,
    scale: float,
    weight_BTHD: np.ndarray | None = None,
) -> Iterator[Mistake]:
    """Wrong forward passes: `out`, and `lse` where the mistake changes it in a known way; with a cotangent of `out`
    also `dq`, `dk`, `dv`.

    Where a mistake makes no difference (heads in another order where there is one head, say) it gives the right result.
    """
    for words, wrong in _wrong_passes(document_ids_BT, scale):
        yield words, partial(_run, wrong, (q_BTHD, k_BTKD, v_BTKD), weight_BTHD)


# q [B, T, H, D], k and v [B, T, K, D] -> `out`, perhaps `lse`; differentiable.
_WrongPass = Callable[[Any, Any, Any], Arrays]


def _run(wrong: _WrongPass, arrays: tuple[np.ndarray, ...], weight_BTHD: np.ndarray | None) -> Arrays:
    if weight_BTHD is None:
        return wrong(*(_float64(x) for x in arrays))
    import jax
    import jax.numpy as jnp

    def split(*qkv: jax.Array) -> tuple[jax.Array, Arrays]:
        found = dict(wrong(*qkv))
        return found.pop("out"), found

    out, pull, rest = jax.vjp(split, *(jnp.asarray(x, jnp.float64) for x in arrays), has_aux=True)
    gradients = dict(zip(("dq", "dk", "dv"), pull(jnp.asarray(weight_BTHD, jnp.float64)), strict=True))
    return {name: np.asarray(x) for name, x in ({"out": out} | rest | gradients).items()}


def _wrong_passes(document_ids_BT: np.ndarray, scale: float) -> Iterator[tuple[str, _WrongPass]]:
    def inputs(q: Any, k: Any, v: Any, order: str = "grouped") -> AttentionInputs:
        return attention_on(q, k, v, document_ids_BT, scale, order)

    for words, mask in wrong_masks(document_ids_BT):
        yield words, lambda q, k, v, mask=mask: forward(replace(inputs(q, k, v), mask_BTT=mask))
    for words, wrong in (
        ("the softmax scale is missing (1 takes its place)", lambda default: 1.0),
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
    yield "the output is all zeros", lambda q, k, v: {"out": 0.0 * q}


def _reorder(right: AttentionInputs, kv_heads: int) -> Arrays:
    H = right.q_BHTD.shape[1]
    order = np.arange(H).reshape(kv_heads, H // kv_heads).T.reshape(-1)
    grouped = forward(right)
    return {"out": grouped["out"][:, :, order], "lse": grouped["lse"][:, order]}


def _leave_unnormalised(right: AttentionInputs) -> Arrays:
    p, lse = softmax(right)
    return {"out": (p * lse.__array_namespace__().exp(lse)[..., None] @ right.v_BHTD).swapaxes(1, 2)}


def _over_queries(right: AttentionInputs) -> Arrays:
    xp = right.q_BHTD.__array_namespace__()
    logits = xp.where(right.mask_BTT[:, None], right.q_BHTD @ right.k_BHTD.swapaxes(2, 3) * right.scale, -np.inf)
    top = _constant(logits.max(initial=0.0, where=xp.isfinite(logits)))
    weights = xp.exp(logits - top)
    total = weights.sum(2, keepdims=True)
    return {"out": (weights / xp.where(total > 0, total, 1.0) @ right.v_BHTD).swapaxes(1, 2)}


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
    last = np.arange(T) == anchor_k.sum(-1, keepdims=True) - 1
    yield (
        "the anchor is repeated at the documents' own end: its last token is missing",
        true & (same | (anchor_k & ~last)),
    )
    yield "top-left alignment: query i of a document sees its first i + 1 keys, anchor included", _top_left(ids)
    yield "padding is visible as a key", (same | anchor_k | ~real_k) & causal & real_q
    yield "padding is treated as one more document", (same | anchor_k) & causal
    yield "padding queries are not put to zero: they attend to padding", (same & causal) | true
    yield "documents begin one token late", visible_BQJ(_shift(ids, 1))
    yield "documents begin one token early", visible_BQJ(_shift(ids, -1))
    yield "the batch shares the documents of its first row", np.broadcast_to(true[:1], true.shape)
    before = np.concatenate([np.full((len(ids), 1), PADDING), ids[:, :-1]], axis=1)
    first_key = ((ids != before) & (ids > ANCHOR))[:, None, :] & ~np.eye(T, dtype=bool)
    yield "the first key of each document is missing", true & ~(same & first_key)


def _shift(ids: np.ndarray, by: int) -> np.ndarray:
    """Boundaries between documents moved; where the anchor and the padding lie stays."""
    moved = np.roll(ids, by, axis=1)
    keep = (ids <= ANCHOR) | (moved <= ANCHOR)
    moved[:, 0 if by > 0 else -1] = ids[:, 0 if by > 0 else -1]
    return np.where(keep, ids, moved)


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


# -- log-sum-exp -------------------------------------------------------------------------------------------------------


def lse_mistakes(right: AttentionInputs, document_ids_BT: np.ndarray) -> Iterator[Mistake]:
    """`lse` where the output is right and the log-sum-exp is not."""

    def lse(attention: AttentionInputs) -> Arrays:
        return {"lse": np.asarray(softmax(attention)[1])}

    for words, mask in wrong_masks(document_ids_BT):
        yield f"in the log-sum-exp, {words}", partial(lse, replace(right, mask_BTT=mask))
    p, true = (np.asarray(x) for x in softmax(right))
    yield "the log-sum-exp is in base 2", lambda: {"lse": true / np.log(2.0)}
    yield "the log-sum-exp is of unscaled logits", partial(lse, replace(right, scale=1.0))
    top = p.max(-1)  # 1 over the sum, if the row's maximum is subtracted
    lacking = np.where(top > 0, -np.log(np.where(top > 0, top, 1.0)), -np.inf)
    yield "the log-sum-exp lacks the row's maximum", lambda: {"lse": lacking}
    yield "the sum of exponentials is returned without its logarithm", lambda: {"lse": np.exp(true)}


# -- backward ----------------------------------------------------------------------------------------------------------


def backward_mistakes(
    right: AttentionInputs, weight_BTHD: np.ndarray, document_ids_BT: np.ndarray, kv_heads: int
) -> Iterator[Mistake]:
    """`dq`, `dk`, `dv` where the forward pass is right."""
    ids, scale, w = document_ids_BT, right.scale, np.asarray(weight_BTHD, np.float64)
    heads = _gradients(right, w, kv_heads)
    true = _sum_heads(heads)

    def changed(parts: tuple[str, ...], change: Callable[[np.ndarray], np.ndarray]) -> Callable[[], Arrays]:
        return lambda: true | {name: change(true[name]) for name in parts}

    for parts in (("dq",), ("dk",), ("dq", "dk")):
        yield f"{' and '.join(parts)} lacks the scale", changed(parts, lambda x: x / scale)
        yield f"{' and '.join(parts)} has the scale twice", changed(parts, lambda x: x * scale)
    for parts in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk", "dv")):
        yield f"{' and '.join(parts)} is all zeros", changed(parts, np.zeros_like)
        yield f"{' and '.join(parts)} has the wrong sign", changed(parts, np.negative)
    yield (
        "dS lacks its row sum (dS = P dP, where it should be P (dP - sum P dP))",
        lambda: _sum_heads(_gradients(right, w, kv_heads, delta=False)),
    )
    for words, of_group in (
        ("gradients of a group of query heads are averaged, not added", lambda x: x.mean(3)),
        ("only the first query head of a group gives k and v a gradient", lambda x: x[:, :, :, 0]),
        ("only the last query head of a group gives k and v a gradient", lambda x: x[:, :, :, -1]),
    ):
        yield words, lambda of_group=of_group: _sum_heads(heads, of_group)
    is_anchor = (ids == ANCHOR)[:, :, None, None]
    last = ids.max(1, keepdims=True)
    for words, queries_BT in (
        ("the anchor's k and v get no gradient from documents", ids == ANCHOR),
        ("the anchor's k and v get their gradient from documents, not from the anchor itself", ids > ANCHOR),
        ("the anchor's k and v get their gradient from the last document only", (ids == ANCHOR) | (ids == last)),
    ):
        some = _sum_heads(_gradients(right, w * queries_BT[:, :, None, None], kv_heads))
        anchored = {name: np.where(is_anchor, some[name], true[name]) for name in ("dk", "dv")}
        yield words, lambda anchored=anchored: true | anchored
    for parts, words in ((("dk",), "k gets"), (("dv",), "v gets"), (("dk", "dv"), "k and v get")):
        yield f"the anchor's {words} no gradient", changed(parts, lambda x: x * ~is_anchor)


def _gradients(right: AttentionInputs, weight_BTHD: np.ndarray, kv_heads: int, delta: bool = True) -> Arrays:
    """dq [B, T, H, D], and dk, dv for each query head apart [B, T, K, G, D]."""
    w_BHTD = weight_BTHD.swapaxes(1, 2)
    p, _ = softmax(right)
    dp = w_BHTD @ right.v_BHTD.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) if delta else dp)
    B, H, T, D = right.q_BHTD.shape

    def group_heads(x_BHTD: Any) -> np.ndarray:
        return np.asarray(x_BHTD).swapaxes(1, 2).reshape(B, T, kv_heads, H // kv_heads, D)

    return {
        "dq": np.asarray(ds @ right.k_BHTD * right.scale).swapaxes(1, 2),
        "dk": group_heads(ds.swapaxes(2, 3) @ right.q_BHTD * right.scale),
        "dv": group_heads(p.swapaxes(2, 3) @ w_BHTD),
    }


def _sum_heads(gradients: Arrays, how: Callable[[np.ndarray], np.ndarray] = lambda x: x.sum(3)) -> Arrays:
    return {"dq": gradients["dq"], "dk": how(gradients["dk"]), "dv": how(gradients["dv"])}
