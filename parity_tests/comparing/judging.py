"""Judge one dump against others: array by array in the order of the computation, by the one rule.

Arrays are mapped and read in blocks, one name at a time. Integers, booleans and masks of 0 and a large negative number
compare exactly.

Legend: B batch · T tokens of a row · H heads · D head_dim · M model width.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anchorline.errors import UserError
from anchorline.tolerance import UNIT_ROUNDOFF, Verdict, judge
from parity_tests.comparing.dumps import Array
from parity_tests.report import measure
from parity_tests.report.names import bare, group_of, layer_and_tap, split
from parity_tests.report.schema import Measure

# An array of fewer values, or with one axis, has too few independent errors to show how much a reference errs: the
# gradient of a norm is a sum over tokens whose terms all layers before it moved together. Those of all layers show it.
FEW = 64
# A reference that errs by this part of the truth's size is taken for another computation. We set this limit, the rule
# does not give it: one rounding of the coarsest dtype, e5m2, is an eighth.
NO_ROUNDING = 0.5
SHOWN = 3

Sides = tuple[Array, Array, Array | None]  # candidate, truth and reference


@dataclass(frozen=True)
class Rule:
    """What arrays are judged by. operations: roundings a layer, where there is no reference. padding_BT: by step, what
    the inputs mark as padding, which is not judged; its shape tells the axes of other arrays."""

    axes: Mapping[str, str]  # pattern of names -> letters
    dtype: str | None
    operations: int
    kind: str  # `reference`, `floor` or `difference`
    padding_BT: Mapping[str, np.ndarray] = field(default_factory=dict[str, np.ndarray])

    def padding(self, name: str) -> np.ndarray | None:
        """Of the inputs that belong to an array; None: the dump does not tell."""
        return self.padding_BT.get(split(name)[0])

    def judged(self, name: str, x: np.ndarray) -> np.ndarray:
        """An array, with 0 where there is padding."""
        padding_BT = None if bare(name).startswith("inputs.") else self.padding(name)
        letters = None if padding_BT is None or not padding_BT.any() else lay_out(name, x.shape, self)[0]
        if padding_BT is None or letters is None or not {"B", "T"} <= {*letters}:
            return x
        if [x.shape[letters.index(letter)] for letter in "BT"] != [*padding_BT.shape]:
            return x
        padding = padding_BT if letters.index("B") < letters.index("T") else padding_BT.T
        others = tuple(axis for axis, letter in enumerate(letters) if letter not in "BT")
        return np.where(np.expand_dims(padding, others), np.zeros((), x.dtype), x)


@dataclass(frozen=True)
class Found:
    """What was found of one array. relative: its error over the truth's size."""

    name: str
    measure: Measure
    relative: float = 0.0
    dtype: str | None = None
    reference: float = 0.0  # the relative error of the reference
    size: float = 0.0
    coarser: int = 0  # 1 where the reference's dtype is coarser than the candidate's, -1 where it is finer


def measure_all(
    pairs: Mapping[str, Sides], rule: Rule, tell: Callable[[str, int, int], None]
) -> tuple[list[Found], list[str]]:
    """Judge every array; those of few values last, with what the reference errs in others of their kind. Return what
    was found, and what kept arrays from being judged.
    """
    layers = {layer for name in pairs if (layer := layer_and_tap(name)[0]) is not None}
    depth = max(layers, default=0) + 1
    found, problems = dict[str, Found](), dict[str, str]()

    def judge_one(name: str, likely: float = 0.0) -> None:
        one = _measure(name, pairs[name], rule, depth, problems, likely)
        if one is not None:
            found[name] = one

    for number, name in enumerate(pairs, start=1):
        judge_one(name)
        tell(name, number, len(pairs))
    for name, likely in _likely_errors(found).items() if rule.kind == "reference" else ():
        judge_one(name, likely)
    return list(found.values()), list(problems.values())


def _likely_errors(found: Mapping[str, Found]) -> dict[str, float]:
    """For each array of few values what a reference may well err: its size times the relative error of its kind.

    The kind is the same array of every layer; for one outside the layers, all of its stage with as many axes; for a
    single number, all of its stage, or of the forward pass. An array that is 0 in truth (the gradient of k where a
    token sees itself alone) has no size: there the errors of its kind count as they are.
    """
    errors: dict[tuple[Any, ...], list[float]] = {}
    kinds: dict[str, list[tuple[Any, ...]]] = {}
    likely: dict[str, float] = {}
    for f in found.values():
        if f.dtype and f.size:
            group, tap, shape = f.measure.group, f.measure.tap + split(f.name)[2], f.measure.shape
            own: list[tuple[Any, ...]] = [(group, tap), (group, len(shape)), (group,)]
            # What is 0 in theory (the gradient of k's bias) and rounding in truth says nothing of other arrays.
            for kind in own if f.reference < NO_ROUNDING else own[:1]:
                errors.setdefault(kind, []).append(f.reference)
            if len(shape) <= 1 or np.prod(shape) < FEW:
                kinds[f.name] = [*own, ("forward",)]
        elif f.dtype and not f.measure.passed:
            alike = [x.reference * x.size for x in found.values() if x.dtype and x.measure.group == f.measure.group]
            likely[f.name] = float(np.sqrt(np.mean(np.square(alike))))
    logits = next((f for name, f in found.items() if bare(name).endswith(("logits", "lm_head"))), None)
    for name, own in kinds.items():
        own_measure = found[name].measure
        if logits and own_measure.group == "loss" and np.prod(own_measure.shape) == 1:
            # A mean over tokens errs as its tokens do, which the logits show, and by the roundings of its sum, in
            # float32 at least: those of N growing partial sums have a standard deviation of sqrt(N) / 3 units.
            # Two standard deviations, as `likely_error_of_mean` returns.
            tokens = max(1.0, float(np.prod(logits.measure.shape[:-1])))
            unit = UNIT_ROUNDOFF["float64" if found[name].dtype == "float64" else "float32"]
            summed = unit * found[name].size * tokens**0.5 / 3
            likely[name] = 2 * float(np.hypot(logits.reference * logits.size / tokens**0.5, summed))
            continue
        alike = next((errors[kind] for kind in own if len(errors.get(kind, ())) > 1), [0.0])
        likely[name] = found[name].size * float(np.sqrt(np.mean(np.square(alike))))
    return likely


def _measure(
    name: str, sides: Sides, rule: Rule, depth: int, problems: dict[str, str], likely: float = 0.0
) -> Found | None:
    """Judge an array; note why it cannot be, or holds what is not finite."""
    candidate, truth, reference = sides
    mine, true = candidate.load(), truth.load()
    other = true if reference is None else reference.load()
    for role, x in (("candidate", mine), ("reference", other)):
        if x.shape != true.shape:
            problems[name] = f"{name} has shape {list(x.shape)} in the {role}, not {list(true.shape)}"
            if x.ndim > 1 and x.shape[:-1] == true.shape[:-1] and layer_and_tap(name)[0] is None:
                few, many = sorted((x.shape[-1], true.shape[-1]))
                problems[name] += f"; cut what is padding by a map's step: {{part: [0, [{few}, {many - few}]]}}"
            return None
    if truth.dtype is None or _is_mask(true):
        return Found(name, measure.judge_exactly(name, mine, true, truth.dtype is not None))
    if candidate.dtype is None:
        problems[name] = f"{name} is {truth.dtype}; the candidate's holds integers"
        return None
    if true.size == 0:
        return Found(name, measure.judge_exactly(name, mine, true))
    mine, true, other = (rule.judged(name, x) for x in (mine, true, other))
    dtype, coarser = rule.dtype or candidate.dtype, 0
    if rule.dtype is None and rule.kind == "floor":
        dtype = dtype_of_values(mine, candidate.dtype)
    elif rule.dtype is None and reference is not None and reference.dtype is not None:
        # Half precision that was widened to be stored, on both sides; of one side it is a fault.
        own, others = dtype_of_values(mine, candidate.dtype), dtype_of_values(other, reference.dtype)
        dtype = own if own == others else candidate.dtype
        coarser = 0 if own == others else int(np.sign(UNIT_ROUNDOFF[others] - UNIT_ROUNDOFF[candidate.dtype]))
    _, view, axes, order = lay_out(name, true.shape, rule)
    judged = axes if rule.kind == "reference" else None
    verdict = judge(view(mine), view(true), view(other), dtype, judged, inherits=True, likely_error=likely)
    if order is not None:
        verdict = replace(verdict, worst=_as_stored(verdict.worst, view(true).shape, order, true.shape))
    if not np.isfinite([verdict.error, verdict.reference]).all():
        # Both may be infinite, in the same places.
        finite = np.where(np.isinf(true), 0.0, true)
        for role, x, right in (("truth", finite, np.zeros(())), ("reference", other, true)):
            if broken := measure.where_not_finite(x, right):
                raise UserError(f"{role}: {name} is {broken}; nothing can be judged by it: record it again")
    verdict = _without_reference(verdict, dtype, rule, _roundings(name, rule, depth))
    profile = None
    if not verdict.passed and group_of(name) == "forward" and judged in ("BTHD", "BTM"):
        profile = measure.profile_of(view(mine), view(true), view(other), dtype)
    relative, expected = (
        x / verdict.size if verdict.size else float(x > 0) for x in (verdict.error, verdict.reference)
    )
    judged = measure.from_verdict(name, true, verdict, profile)
    return Found(name, judged, relative, dtype, expected, verdict.size, coarser)


def _without_reference(verdict: Verdict, dtype: str, rule: Rule, roundings: int) -> Verdict:
    """Independent roundings of the truth's size, each of at most one unit, err together at most the root of their
    number (Higham and Mary, SIAM J. Sci. Comput. 41, 2019); of a difference nothing is allowed."""
    if rule.kind == "reference":
        return verdict
    floor = UNIT_ROUNDOFF[dtype] * verdict.size * (2 * roundings**0.5 + 1)
    return replace(verdict, allowance=floor if rule.kind == "floor" else 0.0, part=None)


def _roundings(name: str, rule: Rule, depth: int) -> int:
    """How many roundings an array has behind it."""
    layer, tap = layer_and_tap(name)
    if group_of(name) != "forward":
        return 3 * (depth + 1) * rule.operations  # forward, backward for inputs and backward for weights
    before = layer is None and tap.startswith(("embed", "rope", "rotary"))
    return rule.operations * (1 if before else depth + 1 if layer is None else layer + 1)


def _as_stored(
    worst: tuple[int, ...], viewed: tuple[int, ...], order: Sequence[int], stored: tuple[int, ...]
) -> tuple[int, ...]:
    """An index of the view of `lay_out` as one of the array."""
    moved = np.unravel_index(np.ravel_multi_index(worst, viewed), tuple(stored[axis] for axis in order))
    return tuple(int(moved[order.index(axis)]) for axis in range(len(stored)))


def lay_out(
    name: str, shape: tuple[int, ...], rule: Rule
) -> tuple[str | None, Callable[..., Any], str | None, list[int] | None]:
    """Letters of an array's axes, by `--axes`, the inputs or its name; how to order them as B, T, heads or experts,
    rest; what `judge` calls it; and that order. None where the axes are not known, or need no order."""
    axes = next((axes for pattern, axes in rule.axes.items() if fnmatchcase(bare(name), pattern)), None)
    if axes is not None and len(axes) != len(shape):
        raise UserError(f"--axes {axes}: {name} has {len(shape)} axes; give one letter each")
    if axes is None and (axes := measure.axes_of(name, len(shape))) in ("BTHD", "BTM"):
        axes = _axes_by_inputs(axes, shape, rule.padding(name))
    if axes is None or axes in ("BTHD", "BTM", "BHT", "BT", "OI"):
        return axes, lambda x: x, axes, None
    if "T" not in axes:
        return axes, lambda x: x, None, None
    heads = next((letter for letter in "HKE" if letter in axes), "")
    rest = "".join(letter for letter in axes if letter not in f"BT{heads}")
    order = [axes.index(letter) for letter in ("B" if "B" in axes else "") + "T" + heads + rest]

    def view(x: np.ndarray) -> np.ndarray:
        moved = x.transpose(order) if "B" in axes else x.transpose(order)[None]
        return moved.reshape(*moved.shape[: 3 if heads else 2], -1)

    return axes, view, "BTHD" if heads else "BTM", order


def _axes_by_inputs(axes: str, shape: tuple[int, ...], padding_BT: np.ndarray | None) -> str:
    """The letters whose sizes are those of the inputs: other engines put heads or tokens before rows, or pack rows."""
    B, T = shape[:2] if padding_BT is None else padding_BT.shape
    sizes = {"B": B, "T": T, "P": B * T}
    for letters in (axes, *{4: ("BHTD", "TBHD"), 3: ("TBM", "PHD")}[len(shape)]):
        if all(sizes.get(letter, size) == size for letter, size in zip(letters, shape, strict=True)):
            return letters.replace("P", "T")
    return axes


def _is_mask(truth: np.ndarray) -> bool:
    """Whether all numbers are 0 or one large negative number, which means "not seen", and there are both."""
    flat, zeros, low = truth.reshape(-1), False, None
    for start in range(0, flat.size, measure.AT_ONCE):
        x = flat[start : start + measure.AT_ONCE].astype(np.float64)
        below = x[x != 0]
        zeros = zeros or below.size < x.size
        if below.size:
            low = below[0] if low is None else low
            if not low <= measure.MASKED or (below != low).any():
                return False
    return zeros and low is not None


def dtype_of_values(x: np.ndarray, stored: str) -> str:
    """The dtype whose numbers all values are: half precision that was widened to be stored is still half precision."""
    if stored not in ("float32", "float64"):
        return stored
    flat = x.reshape(-1)
    values = flat[:: max(1, flat.size // 4096)].astype(np.float64)
    if len(values) < FEW or (values == np.round(values)).all():
        return stored
    for name in ("bfloat16", "float16", "float32"):
        if name != stored and _holds(values, name):
            return name
    return stored


def _holds(values: np.ndarray, dtype: str) -> bool:
    import ml_dtypes

    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return bool((narrow.astype(np.float64) == values).all())
