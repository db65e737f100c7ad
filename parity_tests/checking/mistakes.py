"""What a wrong result looks like: mistakes that are made again and again, computed on purpose and held against the candidate.

Each mistake is attention in float64 with one thing wrong. A candidate whose arrays are, by the one rule, what the mistake
gives, is said to make it. Forward mistakes are tried where `out` or `lse` breaks the rule, backward ones where only
gradients do.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · G query heads per key/value head · D head_dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxref.mask import ANCHOR, PADDING, visible
from parity_tests.checking.cases import LIKE, Arrays, Case, judged_as, oracle, preset_name
from parity_tests.tolerance import judge


@dataclass(frozen=True)
class Setup:
    """Everything attention depends on; a mistake changes one field."""

    q_BHTD: np.ndarray
    k_BHTD: np.ndarray  # one copy for each query head
    v_BHTD: np.ndarray
    mask_BTT: np.ndarray
    scale: float


def _setup(case: Case, mask_BTT: np.ndarray | None = None, scale: float | None = None, order: str = "grouped") -> Setup:
    q, k, v, _ = (x.astype(np.float64).swapaxes(1, 2) for x in case.draw())
    H, K = case.heads, case.kv_heads
    head_H = {"grouped": np.arange(H) // (H // K), "interleaved": np.arange(H) % K, "first": np.zeros(H, int)}[order]
    mask = visible(case.document_ids_BT) if mask_BTT is None else mask_BTT
    return Setup(q, k[:, head_H], v[:, head_H], mask, case.scale if scale is None else scale)


def _softmax(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities [B, H, T, T] and log-sum-exp [B, H, T]; 0 and -inf where nothing is seen."""
    logits = setup.q_BHTD @ setup.k_BHTD.swapaxes(2, 3) * setup.scale
    logits = np.where(setup.mask_BTT[:, None], logits, -np.inf)
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0.0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total > 0, total, 1.0), (top + np.log(total))[..., 0]


def _forward(setup: Setup) -> Arrays:
    p, lse = _softmax(setup)
    return {"out": (p @ setup.v_BHTD).swapaxes(1, 2), "lse": lse}


# -- forward ----------------------------------------------------------------------------------------------------------------


def _wrong_masks(ids: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    T = ids.shape[1]
    true, causal = visible(ids), np.tri(T, dtype=bool)
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
    yield "documents begin one token late", visible(_shift(ids, 1))
    yield "documents begin one token early", visible(_shift(ids, -1))
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


def _forward_mistakes(case: Case) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    default = case.head_dim**-0.5
    for words, mask in _wrong_masks(case.document_ids_BT):
        yield words, lambda mask=mask: _forward(_setup(case, mask))
    for words, scale in (
        ("the softmax scale is missing (1 where it should be head_dim ** -0.5)", 1.0),
        ("the scale that is passed is ignored", default),
        ("the scale is applied twice", case.scale**2),
        ("exp2 without the factor log2(e)", case.scale * np.log(2.0)),
    ):
        yield words, lambda scale=scale: _forward(_setup(case, scale=scale))
    yield (
        "GQA heads in the wrong order: query head h reads key/value head h % K, not h // (H / K)",
        lambda: _forward(_setup(case, order="interleaved")),
    )
    yield "every query head reads key/value head 0", lambda: _forward(_setup(case, order="first"))
    yield "all heads are given out in another order (interleaved with the groups)", lambda: _reordered(case)
    yield "k is used in place of v", lambda: _forward(_with_v(_setup(case)))
    yield "the softmax is not normalised", lambda: _unnormalised(case)
    yield "the softmax is taken over the queries", lambda: _over_queries(case)
    yield "the output is all zeros", lambda: {"out": np.zeros_like(case.draw()[0], dtype=np.float64)}


def _with_v(setup: Setup) -> Setup:
    return Setup(setup.q_BHTD, setup.k_BHTD, setup.k_BHTD, setup.mask_BTT, setup.scale)


def _reordered(case: Case) -> Arrays:
    H, K = case.heads, case.kv_heads
    order = np.arange(H).reshape(K, H // K).T.reshape(-1)
    right = _forward(_setup(case))
    return {"out": right["out"][:, :, order], "lse": right["lse"][:, order]}


def _unnormalised(case: Case) -> Arrays:
    setup = _setup(case)
    p, lse = _softmax(setup)
    return {"out": (p * np.exp(lse)[..., None] @ setup.v_BHTD).swapaxes(1, 2)}


def _over_queries(case: Case) -> Arrays:
    setup = _setup(case)
    logits = np.where(setup.mask_BTT[:, None], setup.q_BHTD @ setup.k_BHTD.swapaxes(2, 3) * setup.scale, -np.inf)
    weights = np.exp(logits - logits.max(initial=0.0, where=np.isfinite(logits)))
    total = weights.sum(2, keepdims=True)
    return {"out": (weights / np.where(total > 0, total, 1.0) @ setup.v_BHTD).swapaxes(1, 2)}


def _lse_mistakes(case: Case) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """Where the output is right and the log-sum-exp is not."""
    for words, mask in _wrong_masks(case.document_ids_BT):
        yield f"in the log-sum-exp, {words}", lambda mask=mask: {"lse": _forward(_setup(case, mask))["lse"]}
    yield "the log-sum-exp is in base 2", lambda: {"lse": oracle(case, "exact")["lse"] / np.log(2.0)}
    yield "the log-sum-exp is of unscaled logits", lambda: {"lse": _forward(_setup(case, scale=1.0))["lse"]}
    yield "the log-sum-exp lacks the row's maximum", lambda: {"lse": _without_maximum(case)}
    yield (
        "the sum of exponentials is returned without its logarithm",
        lambda: {"lse": np.exp(oracle(case, "exact")["lse"])},
    )


def _without_maximum(case: Case) -> np.ndarray:
    p, _ = _softmax(_setup(case))
    top = p.max(-1)
    return np.where(top > 0, -np.log(np.where(top > 0, top, 1.0)), -np.inf)  # the largest probability is 1 / sum


# -- backward ---------------------------------------------------------------------------------------------------------------


def _gradients(case: Case, queries_BT: np.ndarray | None = None, delta: bool = True) -> Arrays:
    """dq [B, T, H, D], and dk, dv still apart for each query head [B, T, K, G, D]; from these queries' cotangents only."""
    setup = _setup(case)
    weight = case.draw()[3].astype(np.float64)
    if queries_BT is not None:
        weight = weight * queries_BT[:, :, None, None]
    w_BHTD = weight.swapaxes(1, 2)
    p, _ = _softmax(setup)
    dp = w_BHTD @ setup.v_BHTD.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) if delta else dp)
    B, H, T, D = setup.q_BHTD.shape

    def grouped(x_BHTD: np.ndarray) -> np.ndarray:
        return x_BHTD.swapaxes(1, 2).reshape(B, T, case.kv_heads, H // case.kv_heads, D)

    return {
        "dq": (ds @ setup.k_BHTD * setup.scale).swapaxes(1, 2),
        "dk": grouped(ds.swapaxes(2, 3) @ setup.q_BHTD * setup.scale),
        "dv": grouped(p.swapaxes(2, 3) @ w_BHTD),
    }


def _summed(gradients: Arrays, how: Callable[[np.ndarray], np.ndarray] = lambda x: x.sum(3)) -> Arrays:
    return {"dq": gradients["dq"], "dk": how(gradients["dk"]), "dv": how(gradients["dv"])}


def _backward_mistakes(case: Case) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    ids = case.document_ids_BT
    truth = oracle(case, "exact")
    right = {name: truth[name] for name in ("dq", "dk", "dv")}
    for parts in (("dq",), ("dk",), ("dq", "dk")):
        words = " and ".join(parts)
        yield f"{words} lacks the scale", lambda parts=parts: right | {n: right[n] / case.scale for n in parts}
        yield f"{words} has the scale twice", lambda parts=parts: right | {n: right[n] * case.scale for n in parts}
    for parts in (("dq",), ("dk",), ("dv",), ("dk", "dv"), ("dq", "dk", "dv")):
        words = " and ".join(parts)
        yield f"{words} is all zeros", lambda parts=parts: right | {n: np.zeros_like(right[n]) for n in parts}
        yield f"{words} has the wrong sign", lambda parts=parts: right | {n: -right[n] for n in parts}
    yield (
        "dS lacks its row sum (dS = P dP, where it should be P (dP - sum P dP))",
        lambda: _summed(_gradients(case, delta=False)),
    )
    yield (
        "gradients of a group of query heads are averaged, not added",
        lambda: _summed(_gradients(case), lambda x: x.mean(3)),
    )
    yield (
        "only the first query head of a group gives k and v a gradient",
        lambda: _summed(_gradients(case), lambda x: x[:, :, :, 0]),
    )
    yield (
        "only the last query head of a group gives k and v a gradient",
        lambda: _summed(_gradients(case), lambda x: x[:, :, :, -1]),
    )
    top = ids.max(1, keepdims=True)
    lowest = np.where(ids > ANCHOR, ids, np.iinfo(ids.dtype).max).min(1, keepdims=True)
    for words, queries_BT in (
        ("the anchor's k and v get no gradient from documents", ids == ANCHOR),
        ("the anchor's k and v get their gradient from documents, not from the anchor itself", ids > ANCHOR),
        ("the anchor's k and v get their gradient from the first document only", (ids == ANCHOR) | (ids == lowest)),
        ("the anchor's k and v get their gradient from the last document only", (ids == ANCHOR) | (ids == top)),
        ("the anchor's k and v get their gradient from the last document only, not from the anchor itself", ids == top),
    ):
        yield words, lambda queries_BT=queries_BT: _anchor_from(case, right, queries_BT)
    for parts, words in (
        (("dk",), "the anchor's k gets no gradient"),
        (("dv",), "the anchor's v gets no gradient"),
        (("dk", "dv"), "the anchor's k and v get no gradient"),
    ):
        yield words, lambda parts=parts: right | {n: right[n] * (ids != ANCHOR)[:, :, None, None] for n in parts}


def _anchor_from(case: Case, right: Arrays, queries_BT: np.ndarray) -> Arrays:
    anchor = (case.document_ids_BT == ANCHOR)[:, :, None, None]
    some = _summed(_gradients(case, queries_BT))
    return {"dq": right["dq"]} | {n: np.where(anchor, some[n], right[n]) for n in ("dk", "dv")}


# -- the comparison ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _computed(case: Case, kind: str) -> tuple[tuple[str, Mapping[str, np.ndarray]], ...]:
    mistakes = {"out": _forward_mistakes, "lse": _lse_mistakes, "gradients": _backward_mistakes}[kind]
    return tuple((words, make()) for words, make in mistakes(case))


def explain(case: Case, arrays: Mapping[str, np.ndarray], broken: tuple[str, ...], like: str) -> dict[str, float]:
    """The mistakes that explain what breaks: words, and error over allowance if that were the right result (up to 1 here).

    Args:
        case: the case that failed.
        arrays: what the candidate computed, as float64.
        broken: names of the arrays that break the rule.
        like: whose roundings it is allowed.
    """
    kind = "out" if "out" in broken else "lse" if "lse" in broken else "gradients"
    judged = tuple(n for n in arrays if n in {"out": ("out", "lse"), "lse": ("lse",)}.get(kind, ("dq", "dk", "dv")))
    truth, reference = oracle(case, "exact"), oracle(case, preset_name(like, case.dtype))
    found = {}
    for words, wrong in _computed(case, kind):
        ratios = []
        for name in (name for name in judged if name in wrong):
            # The roundings of the mistaken computation: those of the right one. Where nothing is seen there are none.
            chosen = np.isfinite(truth[name]) & np.isfinite(wrong[name])
            rounding = reference[name][chosen] - truth[name][chosen]
            right = wrong[name][chosen]
            ratios.append(judge(arrays[name][chosen], right, right + rounding, judged_as(name, like, case.dtype)).ratio)
        if ratios and max(ratios) <= 1:
            found[words] = max(ratios)
    return found


def explain_precision(case: Case, arrays: Mapping[str, np.ndarray], like: str) -> str | None:
    """Whether other roundings would allow what breaks: then it is no mask that is wrong, but a cast."""
    for other in (name for name in LIKE if name != like):
        if _allowed(case, arrays, other, case.dtype):
            return f"a matter of rounding: it rounds like {other!r} attention (declare like={other!r} if that is meant)"
    # The oracle's log-sum-exp is of inputs as they are; a function that casts them first has another.
    outputs = {name: x for name, x in arrays.items() if name != "lse"}
    for half in ("float16", "bfloat16"):
        if case.dtype == "float32" and _allowed(case, outputs, like, half):
            return f"a matter of rounding: some step runs in less than {case.dtype} ({half} would explain it)"
    return None


def _allowed(case: Case, arrays: Mapping[str, np.ndarray], like: str, dtype: str) -> bool:
    truth, reference = oracle(case, "exact"), oracle(case, preset_name(like, dtype))
    for name, x in arrays.items():
        chosen = np.isfinite(truth[name])
        if not judge(x[chosen], truth[name][chosen], reference[name][chosen], judged_as(name, like, dtype)).passed:
            return False
    return True
