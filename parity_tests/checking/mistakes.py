"""Which mistake explains what a function gives: each is computed on purpose and held against the candidate.

Each mistake is attention in float64 with one thing wrong (`parity_tests.wrong_attention` has those of the forward
pass). A candidate whose arrays are, by the one rule, what the mistake gives, is said to make it. Forward mistakes are
tried where `out` or `lse` breaks the rule, backward ones where only gradients do.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · G query heads per key/value head · D head_dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from anchorline.tolerance import judge
from jaxref.mask import ANCHOR
from parity_tests.checking.cases import Arrays, CheckCase, judge_array, judged_as, oracle
from parity_tests.oracle import preset_name
from parity_tests.wrong_attention import (
    AttentionInputs,
    WrongPass,
    attention_on,
    forward,
    softmax,
    wrong_masks,
    wrong_passes,
)

UNLIKELY = 8.0  # standard deviations of independent roundings; beyond, no hint is given. Nothing is judged by it.


def _attention(case: CheckCase) -> AttentionInputs:
    return attention_on(*case.draw()[:3], case.document_ids_BT, case.scale)


def _forward_mistakes(case: CheckCase) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """What wrong forward passes give, their gradients too."""
    for words, wrong in wrong_passes(case.document_ids_BT, case.scale):
        yield words, lambda wrong=wrong: _with_gradients(case, wrong)


def _with_gradients(case: CheckCase, wrong: WrongPass) -> Arrays:
    *qkv, weight = (jnp.asarray(x, jnp.float64) for x in case.draw())

    def split(*qkv: jax.Array) -> tuple[jax.Array, Arrays]:
        arrays = dict(wrong(*qkv))
        return arrays.pop("out"), arrays

    out, pull, rest = jax.vjp(split, *qkv, has_aux=True)
    gradients = dict(zip(("dq", "dk", "dv"), pull(weight), strict=True))
    return {name: np.asarray(x) for name, x in ({"out": out} | rest | gradients).items()}


def _lse_mistakes(case: CheckCase) -> Iterator[tuple[str, Callable[[], Arrays]]]:
    """Where the output is right and the log-sum-exp is not."""
    right = _attention(case)
    for words, mask in wrong_masks(case.document_ids_BT):
        yield f"in the log-sum-exp, {words}", lambda mask=mask: _lse(replace(right, mask_BTT=mask))
    yield "the log-sum-exp is in base 2", lambda: {"lse": oracle(case, "exact")["lse"] / np.log(2.0)}
    yield "the log-sum-exp is of unscaled logits", lambda: _lse(replace(right, scale=1.0))
    yield "the log-sum-exp lacks the row's maximum", lambda: {"lse": _without_maximum(case)}
    yield (
        "the sum of exponentials is returned without its logarithm",
        lambda: {"lse": np.exp(oracle(case, "exact")["lse"])},
    )


def _lse(attention: AttentionInputs) -> Arrays:
    return {"lse": np.asarray(forward(attention)["lse"])}


def _without_maximum(case: CheckCase) -> np.ndarray:
    p, _ = softmax(_attention(case))
    top = np.asarray(p.max(-1))
    return np.where(top > 0, -np.log(np.where(top > 0, top, 1.0)), -np.inf)  # the largest probability is 1 / sum


# -- backward ----------------------------------------------------------------------------------------------------------


def _gradients(case: CheckCase, queries_BT: np.ndarray | None = None, delta: bool = True) -> Arrays:
    """dq [B, T, H, D], and dk, dv for each query head apart [B, T, K, G, D]; of these queries' cotangents only."""
    right = _attention(case)
    weight = case.draw()[3].astype(np.float64)
    if queries_BT is not None:
        weight = weight * queries_BT[:, :, None, None]
    w_BHTD = weight.swapaxes(1, 2)
    p, _ = softmax(right)
    dp = w_BHTD @ right.v_BHTD.swapaxes(2, 3)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) if delta else dp)
    B, H, T, D = right.q_BHTD.shape

    def group_heads(x_BHTD: jax.Array) -> np.ndarray:
        return np.asarray(x_BHTD).swapaxes(1, 2).reshape(B, T, case.kv_heads, H // case.kv_heads, D)

    return {
        "dq": np.asarray(ds @ right.k_BHTD * right.scale).swapaxes(1, 2),
        "dk": group_heads(ds.swapaxes(2, 3) @ right.q_BHTD * right.scale),
        "dv": group_heads(p.swapaxes(2, 3) @ w_BHTD),
    }


def _sum_heads(gradients: Arrays, how: Callable[[np.ndarray], np.ndarray] = lambda x: x.sum(3)) -> Arrays:
    return {"dq": gradients["dq"], "dk": how(gradients["dk"]), "dv": how(gradients["dv"])}


def _backward_mistakes(case: CheckCase) -> Iterator[tuple[str, Callable[[], Arrays]]]:
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
        lambda: _sum_heads(_gradients(case, delta=False)),
    )
    yield (
        "gradients of a group of query heads are averaged, not added",
        lambda: _sum_heads(_gradients(case), lambda x: x.mean(3)),
    )
    yield (
        "only the first query head of a group gives k and v a gradient",
        lambda: _sum_heads(_gradients(case), lambda x: x[:, :, :, 0]),
    )
    yield (
        "only the last query head of a group gives k and v a gradient",
        lambda: _sum_heads(_gradients(case), lambda x: x[:, :, :, -1]),
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


def _anchor_from(case: CheckCase, right: Arrays, queries_BT: np.ndarray) -> Arrays:
    anchor = (case.document_ids_BT == ANCHOR)[:, :, None, None]
    some = _sum_heads(_gradients(case, queries_BT))
    return {"dq": right["dq"]} | {n: np.where(anchor, some[n], right[n]) for n in ("dk", "dv")}


# -- the comparison ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _compute(case: CheckCase, kind: str) -> tuple[tuple[str, Mapping[str, np.ndarray]], ...]:
    mistakes = {"out": _forward_mistakes, "lse": _lse_mistakes, "gradients": _backward_mistakes}[kind]
    return tuple((words, make()) for words, make in mistakes(case))


def explain(case: CheckCase, arrays: Mapping[str, np.ndarray], broken: tuple[str, ...], like: str) -> dict[str, float]:
    """The mistakes that explain every array that breaks: words, and error over allowance (up to 1) if that were right.

    Args:
        case: the case that failed.
        arrays: what the candidate computed, as float64.
        broken: names of the arrays that break the rule.
        like: whose roundings it is allowed.
    """
    kind = "out" if "out" in broken else "lse" if "lse" in broken else "gradients"
    truth, reference = oracle(case, "exact"), oracle(case, preset_name(like, case.dtype))
    found = {}
    for words, wrong in _compute(case, kind):
        if not set(broken) <= set(wrong):
            continue
        ratios = []
        for name in (name for name in arrays if name in wrong):
            # The roundings of the mistaken computation: those of the right one, larger where its numbers are larger.
            # Where nothing is seen there are none.
            chosen = np.isfinite(truth[name]) & np.isfinite(wrong[name])
            right, true, rounded, mine = (
                np.where(chosen, x, 0.0) for x in (wrong[name], truth[name], reference[name], arrays[name])
            )
            size = np.linalg.norm(true)
            growth = max(1.0, np.linalg.norm(right) / size) if size else 1.0
            ratios.append(judge_array(name, mine, right, right + (rounded - true) * growth, like, case.dtype).ratio)
        if max(ratios) <= 1:
            found[words] = max(ratios)
    return found


def explain_precision(case: CheckCase, arrays: Mapping[str, np.ndarray], like: str) -> str | None:
    """Whether the roundings of a half precision allow every array: then a cast is wrong, not a mask."""
    for half in ("float16", "bfloat16"):
        if case.dtype == "float32" and _rounds_like(case, arrays, like, half):
            return f"a matter of rounding: some step runs in less than {case.dtype} ({half} would explain it)"
    return None


def _rounds_like(case: CheckCase, arrays: Mapping[str, np.ndarray], like: str, dtype: str) -> bool:
    """Within the allowance of the dtype, and without the bias that roundings do not have."""
    truth, reference = oracle(case, "exact"), oracle(case, preset_name(like, dtype))
    for name, x in arrays.items():
        chosen = np.isfinite(truth[name])
        right, error = truth[name][chosen], x[chosen] - truth[name][chosen]
        if not judge(x[chosen], right, reference[name][chosen], judged_as(name, like, dtype)).passed:
            return False
        # The error's part along the truth: of independent roundings it is normal with their own root mean square.
        along = abs(np.vdot(error, right)) / max(np.linalg.norm(right), np.finfo(float).tiny)
        if along > UNLIKELY * np.sqrt(np.mean(np.square(error))):
            return False
    return True
