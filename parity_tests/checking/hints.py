"""Which mistake explains what a function gives, for the verdict's last line.

A candidate whose arrays are, by the one rule, what a mistake gives, is said to make it. Forward mistakes are tried
where `out` or `lse` breaks the rule, backward ones where only gradients do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from anchorline.tolerance import judge
from parity_tests.checking.adapter import Adapter
from parity_tests.checking.cases import CheckCase, judge_array, judged_as, oracle
from parity_tests.checking.judging import CaseResult
from parity_tests.mistakes import explanations
from parity_tests.mistakes.attention import attention_on, backward_mistakes, forward_mistakes, lse_mistakes
from parity_tests.oracle import preset_name

UNLIKELY = 8.0  # standard deviations of independent roundings; beyond, no hint is given. Nothing is judged by it.

Rejudge = Callable[[str, CheckCase], bool]


def find_hint(adapter: Adapter, results: Sequence[CaseResult], right_in_layout: Rejudge) -> str | None:
    """Name the mistake that explains most of the failing cases; among equals, the one it fits best.

    right_in_layout: whether the function is right on a case if it is called with another layout of q, k and v.
    """
    like = adapter.like or "flash"
    failed = [r for r in results if r.not_run is None and not r.passed]
    if failed and adapter.layout in ("BTHD", "BHTD"):
        other = "BHTD" if adapter.layout == "BTHD" else "BTHD"
        if right_in_layout(other, failed[0].case):
            return f"q, k and v were given as {adapter.layout}; as {other} it is right: declare layout={other!r}"
    explained: dict[str, list[float]] = {}
    sample = _different_in_kind([r for r in failed if r.broken])
    for result in sample:
        for words, ratio in _explain(result.case, result.arrays, result.broken, like).items():
            explained.setdefault(words, []).append(ratio)
    if explained:
        words, ratios = max(explained.items(), key=lambda item: (len(item[1]), -max(item[1])))
        if len(ratios) == len(sample):
            return words
        return f"{words} (explains {len(ratios)} of {len(sample)} failing layouts tried)"
    return _explain_precision(sample[0].case, sample[0].arrays, like) if sample else None


def _different_in_kind(broken: list[CaseResult], most: int = 4) -> list[CaseResult]:
    """One failing case of each layout, short rows first: what shows on several layouts has fewer explanations."""
    by_layout = {r.case.layout.name: r for r in reversed(broken)}
    return sorted(by_layout.values(), key=lambda r: r.case.document_ids_BT.size)[:most]


@lru_cache(maxsize=64)
def _compute(case: CheckCase, kind: str) -> tuple[tuple[str, dict[str, np.ndarray]], ...]:
    """Every mistake of a kind on a case, computed once for all that fail on it."""
    if case.layout.adds:
        return tuple((words, dict(oracle(wrong, "exact"))) for words, wrong in _other_layers(case))
    q, k, v, weight = case.draw()
    ids, scale = case.document_ids_BT, case.scale
    if kind == "out":
        mistakes = forward_mistakes(q, k, v, ids, scale, weight)
    else:
        right = attention_on(q, k, v, ids, scale)
        mistakes = lse_mistakes(right, ids) if kind == "lse" else backward_mistakes(right, weight, ids, case.kv_heads)
    return tuple((words, compute()) for words, compute in mistakes)


def _other_layers(case: CheckCase) -> Iterator[tuple[str, CheckCase]]:
    """Yield the case with one thing of its layer wrong, and that thing in words."""
    window = case.layout.window
    changes: dict[str, dict[str, Any]] = {}
    if window is not None:
        changes |= {
            "the window is left out": {"window": None},
            "the window is one token too long": {"window": window + 1},
            "the window is one token too short": {"window": window - 1},
            "beyond the window the anchor is " + ("hidden" if case.layout.keep_anchor else "visible"): {
                "keep_anchor": not case.layout.keep_anchor
            },
        }
    if case.layout.softcap is not None:
        changes["the soft cap is left out"] = {"softcap": None}
    if case.layout.sinks:
        changes["the sinks are left out"] = {"sinks": False}
    for words, change in changes.items():
        yield words, replace(case, layout=replace(case.layout, **change))


def _explain(case: CheckCase, arrays: Mapping[str, np.ndarray], broken: tuple[str, ...], like: str) -> dict[str, float]:
    """Words of the mistakes that explain every array that breaks, and their ratios."""
    kind = "out" if "out" in broken else "lse" if "lse" in broken else "gradients"
    truth, reference = oracle(case, "exact"), oracle(case, preset_name(like, case.dtype))

    def ratio_of(wrong: dict[str, np.ndarray]) -> float:
        if not set(broken) <= set(wrong):
            return np.inf
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
        return max(ratios)

    return dict(explanations(((words, lambda wrong=wrong: wrong) for words, wrong in _compute(case, kind)), ratio_of))


def _explain_precision(case: CheckCase, arrays: Mapping[str, np.ndarray], like: str) -> str | None:
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
