"""Judge one dump against others: array by array in the order of the computation, by the one rule.

Arrays are mapped and read in blocks, one name at a time. Integers, booleans and masks of 0 and a large negative number
compare exactly.

Legend: B batch · T tokens of a row · H heads · D head_dim · M model width.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from anchorline.errors import UserError
from anchorline.tolerance import UNIT_ROUNDOFF, Verdict, judge
from parity_tests.comparing.dumps import Array, blocks
from parity_tests.report.measure import axes_of, judged, profile_of, where_not_finite
from parity_tests.report.names import group_of, layer_and_tap
from parity_tests.report.schema import Measure

# An array of fewer values, or with one axis, has too few independent errors to show how much a reference errs: the
# gradient of a norm is a sum over tokens whose terms all layers before it moved together. Those of all layers show it.
FEW = 64
MASKED = -1e4  # from here on a number in a mask means "not seen"
SHOWN = 3
_AT_ONCE = 2**22

Sides = tuple[Array, Array, Array | None]  # candidate, truth and reference


@dataclass(frozen=True)
class Rule:
    """What arrays are judged by. operations: roundings a layer, where there is no reference."""

    axes: Mapping[str, str]  # pattern of names -> letters
    dtype: str | None
    operations: int
    kind: str  # `reference`, `floor` or `difference`


@dataclass(frozen=True)
class Found:
    """What was found of one array. relative: its error over the truth's size. problem: why it was not judged."""

    name: str
    measure: Measure | None
    relative: float = 0.0
    dtype: str | None = None
    problem: str | None = None
    reference: float = 0.0  # the relative error of the reference
    size: float = 0.0


def choose(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that fit one of the patterns; all where there is none."""
    return [name for name in names if not only or any(fnmatchcase(name, pattern) for pattern in only)]


def measure_all(pairs: Mapping[str, Sides], rule: Rule, tell: Callable[[str, int, int], None]) -> list[Found]:
    """Judge every array; those of few values last, with what the reference errs in others of their kind."""
    layers = {layer for name in pairs if (layer := layer_and_tap(_bare(name))[0]) is not None}
    depth = max(layers, default=0) + 1
    found: dict[str, Found] = {}
    for number, (name, sides) in enumerate(pairs.items(), start=1):
        found[name] = _measure(name, sides, rule, depth)
        tell(name, number, len(pairs))
    for name, likely in _likely_errors(found).items() if rule.kind == "reference" else ():
        found[name] = _measure(name, pairs[name], rule, depth, likely)
    return list(found.values())


def _likely_errors(found: Mapping[str, Found]) -> dict[str, float]:
    """For each array of few values what a reference may well err: its size times the relative error of its kind.

    The kind is the same array of every layer; for one outside the layers, all of its stage with as many axes; for a
    single number, all of its stage, or of the forward pass.
    """
    errors: dict[tuple[Any, ...], list[float]] = {}
    kinds: dict[str, list[tuple[Any, ...]]] = {}
    for f in found.values():
        if f.measure and f.dtype and f.size:
            group, tap, shape = f.measure.group, f.measure.tap, f.measure.shape
            own: list[tuple[Any, ...]] = [(group, tap), (group, len(shape)), (group,)]
            for kind in own:
                errors.setdefault(kind, []).append(f.reference)
            if len(shape) <= 1 or np.prod(shape) < FEW:
                kinds[f.name] = [*own, ("forward",)]
    likely = {}
    logits = next((f for name, f in found.items() if name.endswith(("logits", "lm_head")) and f.measure), None)
    for name, own in kinds.items():
        measure = found[name].measure
        if logits and logits.measure and measure and measure.group == "loss" and np.prod(measure.shape) == 1:
            # A mean over tokens: twice the standard deviation of as many independent errors of logits.
            tokens = np.prod(logits.measure.shape[:-1])
            likely[name] = 2 * logits.reference * logits.size / float(np.sqrt(max(1, tokens)))
            continue
        alike = next((errors[kind] for kind in own if len(errors.get(kind, ())) > 1), [0.0])
        likely[name] = found[name].size * float(np.sqrt(np.mean(np.square(alike))))
    return likely


def _measure(name: str, sides: Sides, rule: Rule, depth: int, likely: float = 0.0) -> Found:
    bare = _bare(name)
    layer, tap = layer_and_tap(bare)
    candidate, truth, reference = sides
    rest: dict[str, Any] = {"name": name, "group": group_of(bare), "layer": layer, "tap": tap}
    mine, true = candidate.load(), truth.load()
    other = true if reference is None else reference.load()
    rest["shape"] = list(true.shape)
    for role, x in (("candidate", mine), ("reference", other)):
        if x.shape != true.shape:
            return Found(name, None, problem=f"{name} has shape {list(x.shape)} in the {role}, not {list(true.shape)}")
    if truth.dtype is None or _is_mask(true):
        # Of a mask every large negative number says the same.
        (error, worst), count = _count_differences(mine, true, truth.dtype is not None), true.size
        index = [int(i) for i in np.unravel_index(worst, true.shape)] if count else []
        return Found(name, Measure(**rest, error=error, allowance=0.0, worst=index))
    if candidate.dtype is None:
        return Found(name, None, problem=f"{name} is {truth.dtype}; the candidate's holds integers")
    if true.size == 0:
        return Found(name, Measure(**rest, error=0.0, allowance=0.0, worst=[]))
    dtype = rule.dtype or candidate.dtype
    if rule.dtype is None and reference is not None and reference.dtype is not None:
        # Half precision that was widened to be stored, on both sides; of one side it is a fault.
        own, others = _dtype_of_values(mine, candidate.dtype), _dtype_of_values(other, reference.dtype)
        dtype = own if own == others else candidate.dtype
    broken = where_not_finite(mine, true) if mine.size <= _AT_ONCE else None
    axes = _axes(name, true.ndim, rule) if rule.kind == "reference" else None
    view, axes = _canonical(axes)
    verdict = judge(view(mine), view(true), view(other), dtype, axes, inherits=True, likely_error=likely)
    verdict = _without_reference(verdict, dtype, rule, _roundings(rest, rule, depth))
    measure = Measure(**rest, **judged(verdict))
    if not measure.passed and rest["group"] == "forward" and true.ndim >= 3 and rule.kind == "reference":
        measure = measure.model_copy(update={"profile": profile_of(mine, true, other, dtype)})
    relative = [x / verdict.size if verdict.size else float(x > 0) for x in (verdict.error, verdict.reference)]
    problem = f"{name} is {broken}" if broken else None
    return Found(name, measure, relative[0], dtype, problem, relative[1], verdict.size)


def _without_reference(verdict: Verdict, dtype: str, rule: Rule, roundings: int) -> Verdict:
    """Independent roundings of the truth's size, each of at most one unit, err together at most the root of their
    number (Higham and Mary, SIAM J. Sci. Comput. 41, 2019); of a difference nothing is allowed."""
    if rule.kind == "reference":
        return verdict
    floor = UNIT_ROUNDOFF[dtype] * verdict.size * (2 * roundings**0.5 + 1)
    return replace(verdict, allowance=floor if rule.kind == "floor" else 0.0, part=None)


def _roundings(place: Mapping[str, Any], rule: Rule, depth: int) -> int:
    """How many roundings an array has behind it."""
    if place["group"] != "forward":
        return 3 * (depth + 1) * rule.operations  # forward, backward for inputs and backward for weights
    before = place["layer"] is None and place["tap"].startswith(("embed", "rope", "rotary"))
    return rule.operations * (1 if before else depth + 1 if place["layer"] is None else place["layer"] + 1)


def _axes(name: str, dimensions: int, rule: Rule) -> str | None:
    said = next((axes for pattern, axes in rule.axes.items() if fnmatchcase(name, pattern)), None)
    if said is None:
        return axes_of(_bare(name), dimensions)
    if len(said) != dimensions:
        raise UserError(f"--axes {said}: {name} has {dimensions} axes; give one letter each")
    return said


def _canonical(axes: str | None) -> tuple[Callable[[np.ndarray], np.ndarray], str | None]:
    """How to bring the axes into the order B, T, heads or experts, rest, and what `judge` calls that order."""
    if axes is None or axes in ("BTHD", "BTM", "BHT", "BT", "OI"):
        return lambda x: x, axes
    if "T" not in axes:
        return lambda x: x, None
    heads = next((letter for letter in "HKE" if letter in axes), "")
    rest = "".join(letter for letter in axes if letter not in f"BT{heads}")
    order = [axes.index(letter) for letter in ("B" if "B" in axes else "") + "T" + heads + rest]

    def view(x: np.ndarray) -> np.ndarray:
        moved = x.transpose(order) if "B" in axes else x.transpose(order)[None]
        return moved.reshape(*moved.shape[: 3 if heads else 2], -1)

    return view, "BTHD" if heads else "BTM"


def _is_mask(truth: np.ndarray) -> bool:
    """Whether all numbers are 0 or mean "not seen"."""
    flat, seen = truth.reshape(-1), False
    for block in blocks(flat.size, _AT_ONCE):
        x = flat[block].astype(np.float32)
        if not ((x == 0) | (x <= MASKED)).all():
            return False
        seen = seen or bool((x != 0).any())
    return seen


def _count_differences(mine: np.ndarray, true: np.ndarray, mask: bool) -> tuple[float, int]:
    first, count = 0, 0
    mine, true = mine.reshape(-1), true.reshape(-1)
    for block in blocks(true.size, _AT_ONCE):
        differs = (mine[block] <= MASKED) != (true[block] <= MASKED) if mask else mine[block] != true[block]
        if count == 0 and differs.any():
            first = (block.start or 0) + int(differs.argmax())
        count += int(differs.sum())
    return float(count), first


def _dtype_of_values(x: np.ndarray, stored: str) -> str:
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


def _bare(name: str) -> str:
    """Without `step 3: `."""
    return name.rpartition(": ")[2]
