"""One function on one case: its arrays by the one rule, and that nothing invisible has an effect, exactly.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from anchorline.tolerance import Verdict
from jaxref.mask import ANCHOR, PADDING, visible_BQJ
from parity_tests.checking.adapter import Resolved
from parity_tests.checking.call import AUTOCAST, Candidate, Pull, Unusable
from parity_tests.checking.cases import ADDED, Arrays, CheckCase, judge_array, oracle, other_documents
from parity_tests.oracle import preset_name

MODES_ON = ("anchor", "intra")  # layouts on which a function is called under inference mode and compiled too
LONGEST_AGAIN = 64  # tokens of a row that is tried a second time with other documents
PROBES = 20  # about so many documents of a row are tried for isolation
ARRAYS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class CaseResult:
    """What one case found."""

    case: CheckCase
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)  # by array, in the order of `ARRAYS`
    isolated: bool | None = None  # nothing invisible has an effect; None: not run
    problem: str | None = None  # what it did instead of computing attention, or how something invisible has an effect
    not_run: str | None = None  # why the case was not run
    remarks: tuple[str, ...] = ()  # what is worth knowing and breaks nothing
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)  # of a case that failed

    @property
    def passed(self) -> bool:
        """Whether it was judged, every array keeps the rule and nothing invisible has an effect."""
        return bool(self.verdicts) and not self.broken and self.problem is None

    @property
    def broken(self) -> tuple[str, ...]:
        """Names of the arrays that break the rule."""
        return tuple(name for name, verdict in self.verdicts.items() if not verdict.passed)


def check_case(fn: Callable[..., Any], how: Resolved, case: CheckCase, *, backward: bool, device: str) -> CaseResult:
    """Judge a function on a case. What the function does wrong comes back as words, never as an exception."""
    missing = why_not_run(how, case)
    if missing:
        return CaseResult(case, not_run=missing)
    candidate = Candidate(fn, how, case, device)
    like = candidate.like
    q, k, v, weight = case.draw()
    arrays: Arrays = {}
    remarks: list[str] = []
    isolated: bool | None = None
    problem: str | None = None
    try:
        arrays |= candidate.forward(q, k, v)
        repeatable = np.array_equal(arrays["out"], candidate.forward(q, k, v)["out"], equal_nan=True)
        if not repeatable:
            remarks.append("not deterministic: two calls on the same inputs differ")
        _refuse_nan(case, arrays)
        without, pull = arrays, None
        if backward and "backward" not in how.adapter.lacks:
            arrays, pull = candidate.forward_and_pull(q, k, v)
            arrays |= pull(weight)
            _refuse_nan(case, arrays)
        right = _wrong(case, arrays, like) is None
        if right and pull is not None:
            changed = {n: x for n, x in without.items() if not np.array_equal(x, arrays[n], equal_nan=True)}
            # What is asked for decides which kernel runs.
            name = _wrong(case, changed, like)
            problem = f"{name} is wrong without gradients, though right with them" if name else None
            problem = problem or _gradients_alone(candidate)
        if right and repeatable and problem is None:
            problem = _stale(candidate) or _modes(candidate)
        if repeatable and problem is None:
            problem = _influence(candidate)
        if problem is None and pull is not None:
            problem = _stray_gradient(case, pull, weight)
        if repeatable or pull is not None:
            isolated = problem is None
        else:
            remarks.append("isolation is not proved: without gradients it takes a function that repeats itself")
    except Unusable as words:
        problem = str(words)
    verdicts = _verdicts(case, arrays, like)
    failed = problem is not None or not all(verdict.passed for verdict in verdicts.values())
    return CaseResult(case, verdicts, isolated, problem, None, tuple(remarks), arrays if failed else {})


def _wrong(case: CheckCase, arrays: Arrays, like: str) -> str | None:
    """The first of some arrays that breaks the rule."""
    return next((name for name, verdict in _verdicts(case, arrays, like).items() if not verdict.passed), None)


def why_not_run(how: Resolved, case: CheckCase) -> str | None:
    """Why a function cannot be judged on a case, or None."""
    if how.adapter.dtypes is not None and case.dtype not in how.adapter.dtypes:
        return f"takes no {case.dtype}"
    lacks = sorted(case.needs & how.adapter.lacks)
    if lacks:
        return f"lacks {', '.join(lacks)}"
    for name in sorted(case.needs & {"scale", *ADDED}):
        if not takes(how, name):
            return f"takes no {name}"
    return None


def takes(how: Resolved, name: str) -> bool:
    """Whether a function has a parameter for `scale` or for a name of `ADDED`."""
    return any(parameter in how.keywords for parameter in ADDED.get(name, (name,)))


def _verdicts(case: CheckCase, arrays: Arrays, like: str) -> dict[str, Verdict]:
    truth, reference = oracle(case, "exact"), oracle(case, preset_name(like, case.dtype))
    verdicts = {}
    for name in (name for name in ARRAYS if name in arrays):
        chosen = real_queries(case) if name == "lse" else True
        values, right, rounded = (np.where(chosen, x[name], 0.0) for x in (arrays, truth, reference))
        verdicts[name] = judge_array(name, values, right, rounded, like, case.dtype)
    return verdicts


def real_queries(case: CheckCase) -> np.ndarray:
    """Bool [B, H, T]. Of a token that sees nothing the lse is not judged: kernels give -inf, +inf or a large number."""
    return np.repeat((case.document_ids_BT != PADDING)[:, None], case.heads, axis=1)


def _refuse_nan(case: CheckCase, arrays: Arrays) -> None:
    for name in (name for name in ARRAYS if name in arrays):
        bad = np.isnan(arrays[name])
        if name == "lse":
            bad &= real_queries(case)
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            row, token = (where[0], where[2]) if name == "lse" else where[:2]
            padding = (case.document_ids_BT == PADDING)[:, :, None, None]
            only = (
                " and only at padding: put rows that see nothing to 0"
                if name != "lse" and not (bad & ~padding).any()
                else ""
            )
            raise Unusable(f"{name} is NaN at {place(case, row, token)}{only}")


def place(case: CheckCase, row: int, token: int) -> str:
    """`row 0, token 19 (document 2, its token 0)`."""
    ids_T = case.document_ids_BT[row]
    document = ids_T[token]
    if document == PADDING:
        return f"row {row}, token {token} (padding)"
    own = int((ids_T[:token] == document).sum())
    return (
        f"row {row}, token {token} ({'the anchor' if document == ANCHOR else f'document {document}'}, its token {own})"
    )


def _probes(case: CheckCase) -> Iterator[tuple[int, np.ndarray, np.ndarray, str]]:
    """Row, queries [T], keys [B, T] that none of them may see, and words: the first half of each document in turn.

    The first half sees neither the second nor another document nor another row, so one probe tests causality,
    documents, padding and the batch at once.
    """
    layout = case.layout
    visible_BTT = visible_BQJ(layout.document_ids_BT, None, None, layout.window, layout.keep_anchor)
    for row, ids_T in enumerate(case.document_ids_BT):
        documents = np.unique(ids_T[ids_T != PADDING])
        for document in documents[:: max(1, len(documents) // PROBES)]:
            own = np.flatnonzero(ids_T == document)
            queries_T = np.zeros(len(ids_T), dtype=bool)
            queries_T[own[: -(-len(own) // 2)]] = True
            hidden_BT = np.ones(case.document_ids_BT.shape, dtype=bool)
            hidden_BT[row] = ~visible_BTT[row, queries_T].any(0)
            if hidden_BT.any():
                name = "the anchor" if document == ANCHOR else f"document {document}"
                yield row, queries_T, hidden_BT, f"the first half of {name} in row {row}"


def _stale(candidate: Candidate) -> str | None:
    """Call again with other documents, in the same tensors: what is kept of the earlier call must not count."""
    case = candidate.case
    other = replace(case, layout=other_documents(case.layout))
    if other.document_ids_BT.tolist() == case.document_ids_BT.tolist() or candidate.how.adapter.documents == "none":
        return None
    if case.document_ids_BT.shape[1] > LONGEST_AGAIN or not other.layout.needs <= case.layout.needs:
        return None
    fresh, again = (Candidate(candidate.fn, candidate.how, c, candidate.device) for c in (other, case))
    again.forward(*case.draw()[:3])
    again.refill(fresh)
    reused = replace(again, case=other)
    reused.__dict__["_keywords"] = again._keywords
    # The same tensors are used in two calls, one right after the other.
    reused_out, fresh_out = (once.forward(*other.draw()[:3])["out"] for once in (reused, fresh))
    if _wrong(other, {"out": fresh_out}, candidate.like):
        return f"is wrong where documents have other lengths ({_lengths(other)})"
    if _wrong(other, {"out": reused_out}, candidate.like):
        return "is wrong in a second call with other documents of the same shape: something of the first is kept"
    return None


def _lengths(case: CheckCase) -> str:
    """A layout's first row in words: `0: 1, 1: 17, 2: 7`, as document and tokens."""
    runs = [(document, len(list(tokens))) for document, tokens in groupby(case.layout.rows[0])]
    return "row 0 has " + ", ".join(f"{tokens} of {document}" for document, tokens in runs)


def _modes(candidate: Candidate) -> str | None:
    """Call under torch's inference mode and compiled: the same by the rule."""
    case = candidate.case
    if candidate.how.adapter.library != "torch" or case.layout.name not in MODES_ON:
        return None
    q, k, v, _ = case.draw()
    for words, run in candidate.in_modes():
        out = run(q, k, v)
        # Autocast makes every product round: what transformers' eager attention is allowed.
        if out is not None and _wrong(case, {"out": out}, "eager" if words == AUTOCAST else candidate.like):
            return f"is wrong under {words}, though right without"
    return None


def _gradients_alone(candidate: Candidate) -> str | None:
    """Ask for the gradient of q, of k and of v alone, as where the others' projections are frozen; and for all of them
    after another forward pass, as layers have it.
    """
    case = candidate.case
    if candidate.how.adapter.library != "torch" or case.layout.name not in MODES_ON:
        return None
    q, k, v, weight = case.draw()
    alone = [candidate.some_gradients(name, q, k, v, weight_BTHD=weight) for name in "qkv"]
    after = candidate.some_gradients("qkv", q, k, v, weight_BTHD=weight, another=True)
    for grads, words in (
        *((each, "where nothing else has a gradient") for each in alone),
        (after, "where another forward pass comes before the backward pass: what it needs was overwritten"),
    ):
        if name := _wrong(case, grads, candidate.like):
            return f"{name} is wrong {words}"
    return None


def _influence(candidate: Candidate) -> str | None:
    """Put other numbers into keys and values that are invisible: not a bit of the output may move."""
    case = candidate.case
    q, k, v, _ = case.draw()
    random = np.random.default_rng(case.seed + 1)
    base = candidate.forward(q, k, v)["out"]  # without gradients, as the calls below: another kernel may run with them
    for row, queries_T, hidden_BT, words in _probes(case):
        changed = [
            np.where(hidden_BT[..., None, None], random.standard_normal(x.shape).astype(x.dtype), x) for x in (k, v)
        ]
        moved = candidate.forward(q, *changed)["out"][row, queries_T] != base[row, queries_T]
        if moved.any():
            token = int(np.flatnonzero(queries_T)[np.argwhere(moved)[0][0]])
            seen = _first_seen(candidate, base, row, queries_T, hidden_BT)
            at = f"the output of {words} changes (first at token {token})"
            return f"not isolated: {at} when {seen} is changed, which it cannot see"
    return None


def _first_seen(candidate: Candidate, base: np.ndarray, row: int, queries_T: np.ndarray, hidden_BT: np.ndarray) -> str:
    """Which invisible document has the effect: change one after the other."""
    case = candidate.case
    q, k, v, _ = case.draw()
    for b, ids_T in enumerate(case.document_ids_BT):
        for document in np.unique(ids_T[hidden_BT[b]]):
            chosen_BT = np.zeros_like(hidden_BT)
            chosen_BT[b] = hidden_BT[b] & (ids_T == document)
            # A token's own numbers negated are other numbers of the same size.
            changed = [np.where(chosen_BT[..., None, None], -x, x) for x in (k, v)]
            if (candidate.forward(q, *changed)["out"][row, queries_T] != base[row, queries_T]).any():
                what = {PADDING: "padding", ANCHOR: "the anchor"}.get(int(document), f"document {document}")
                own = b == row and document == case.document_ids_BT[row][queries_T][0]
                return f"what comes later in {what}" if own else f"{what} of row {b}"
    return "several invisible documents at once"


def _stray_gradient(case: CheckCase, pull: Pull, weight: np.ndarray) -> str | None:
    """Gradients of some queries' output at keys and values that they cannot see must be exactly zero."""
    for row, queries_T, hidden_BT, words in _probes(case):
        only = np.zeros_like(weight)
        only[row, queries_T] = weight[row, queries_T]
        grads = pull(only)
        for name in ("dk", "dv"):
            stray = np.abs(grads[name]) * hidden_BT[..., None, None]
            if stray.any():
                b, token, *_ = np.unravel_index(int(stray.argmax()), stray.shape)
                return (
                    f"not isolated: {words} gives {name[1]} at {place(case, int(b), int(token))} a gradient of "
                    f"{stray.max():.2g}, which it cannot see: exactly 0 is right"
                )
    return None
