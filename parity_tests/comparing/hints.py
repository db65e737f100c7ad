"""What an array that breaks looks like: mistakes that need nothing but the arrays of both dumps.

A mistake is named only if it gives the candidate's numbers within the allowance.

Legend: B batch · T tokens of a row · M model width.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from anchorline.errors import UserError
from jaxref.frequencies import inverse_frequencies
from jaxref.rope_spec import RopeSpec
from parity_tests.comparing.dumps import Array
from parity_tests.mistakes.rotation import describe_shifts, rotate
from parity_tests.mistakes.words import Known, explain_attention, explain_rotation, explains, scaled
from parity_tests.report.schema import Measure

MOST = 2**24  # values of an array that is explained
KEPT = 2**20  # values of an array that is kept while others are tried
NEAR = 24  # arrays before it that are tried in its place


class Loaded(Mapping[str, np.ndarray]):
    """Arrays of a dump by name, float64, read when asked for; those of more than `MOST` values are not in it.

    q and k after RoPE, which no module puts out, are computed from those before it, where they are not recorded.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays, self._kept = arrays, {}
        self.turn: Callable[[np.ndarray], np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._kept:
            stem = name.removesuffix("_rope")
            if name not in self._arrays and name != stem and self.turn is not None:
                return self.turn(self[f"{stem}_norm" if f"{stem}_norm" in self._arrays else stem])
            x = self._arrays[name].load()
            if x.size > MOST:
                raise KeyError(name)
            x = np.asarray(x, np.float64 if self._arrays[name].dtype else None)
            if x.size > KEPT:
                return x
            self._kept[name] = x
        return self._kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def know(candidate: Mapping[str, Array], truth: Mapping[str, Array], config: Mapping[str, Any]) -> Known:
    """What explanations may look at. Where the dumps lack position or document ids, rows of one document are tried."""
    mine, true = Loaded(candidate), Loaded(truth)
    ids = {}
    for what in ("position_ids", "document_ids"):
        name = next((n for n in (f"inputs.{what}", what) if n in truth), None)
        ids[what] = None if name is None else true[name]
    layer = next((true[n] for n in truth if n.endswith((".q", ".attn")) and n in true and true[n].ndim == 4), None)
    rope, scale = None, None
    if layer is not None:
        B, T, _, D = layer.shape
        for what, x in ids.items():  # of other shapes (three rows a token, one row for all) nothing is tried
            if x is not None and (x.dtype.kind not in "iu" or x.shape not in ((B, T), (1, T))):
                ids[what] = None
        ids["position_ids"] = (
            np.broadcast_to(np.arange(T), (B, T)) if ids["position_ids"] is None else ids["position_ids"]
        )
        ids["document_ids"] = np.ones((B, T), int) if ids["document_ids"] is None else ids["document_ids"]
        scale = D**-0.5
        rope = _rope(config, D)
        frequencies_C, scaling = inverse_frequencies(rope, T)
        turn = partial(rotate, positions_BT=ids["position_ids"], frequencies_C=frequencies_C, scaling=scaling)
        mine.turn = true.turn = turn
    return Known(mine, true, ids["position_ids"], ids["document_ids"], rope, scale)


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """By the config; without one the commonest, of which a mistake is named only if it gives the numbers."""
    try:
        return RopeSpec.from_hf(dict(config) | {"head_dim": head_dim}) if config else RopeSpec(head_dim, 1e4)
    except (UserError, KeyError, TypeError, AttributeError):
        return RopeSpec(head_dim, 1e4)


def explain(measure: Measure, known: Known, before: list[str]) -> str | None:
    """Return words for the first mistake that gives the candidate's array, or None. before: names that come first."""
    name = measure.name
    if np.prod(measure.shape) > MOST or name not in known.candidate or not measure.shape:
        return None
    mine, true = known.candidate[name], known.truth[name]
    if measure.allowance == 0:
        return _explain_integers(mine, true, "position" in name)
    if not (np.isfinite(mine) & np.isfinite(true)).all():
        return None
    found = None
    if measure.tap in ("q_rope", "k_rope") and mine.ndim == 4:
        found = explain_rotation(measure, known)
    if measure.tap == "attn" and mine.ndim == 4:
        found = explain_attention(measure, known)
    return (
        found
        or scaled(measure, mine, true)
        or _explain_by_others(measure, known, before)
        or _explain_by_axes(measure, mine, true)
    )


def _explain_by_others(measure: Measure, known: Known, before: list[str]) -> str | None:
    """Another array in its place, or one left out of a sum or added twice."""
    mine, true = known.candidate[measure.name], known.truth[measure.name]
    own = [name for name in before if name.startswith(measure.name.rpartition(".")[0])]
    for name in list(dict.fromkeys([*reversed(before[-NEAR:]), *own])):
        if name not in known.candidate or known.candidate[name].shape != mine.shape:
            continue
        other = known.candidate[name]
        if explains(measure, mine, other):
            missing = "; the residual is missing" if "residual" in measure.tap or measure.tap == "output" else ""
            return f"it is {name} and nothing else{missing}"
        for factor, words in ((-1.0, "is left out"), (1.0, "is added once too often")):
            if explains(measure, mine, true + factor * other):
                return f"{name} {words}"
    return None


def _explain_by_axes(measure: Measure, mine: np.ndarray, true: np.ndarray) -> str | None:
    """The right numbers in other places, or a factor or a summand that runs along one axis."""
    last = true.ndim - 1
    places: list[tuple[str, Callable[[], np.ndarray]]] = []
    if true.ndim >= 3:
        places += [
            ("every token has what belongs to the token before it", lambda: _moved(true, 1)),
            ("every token has what belongs to the token behind it", lambda: _moved(true, -1)),
        ]
    if true.ndim >= 2:
        half = true.shape[last] // 2
        places += [("rows and columns are exchanged", lambda: true.swapaxes(last, last - 1))] * (
            true.shape[last] == true.shape[last - 1]
        )
        places += [
            ("the two halves of the last axis are exchanged", lambda: np.roll(true, half, axis=last)),
            (
                "the last axis has neighbours as pairs, where halves are right (or the other way round)",
                lambda: np.concatenate([true[..., ::2], true[..., 1::2]], axis=last),
            ),
            ("the last axis has halves, where neighbours as pairs are right", lambda: _interleave(true)),
        ]
    if true.ndim == 4:
        places += [
            ("heads are in the opposite order", lambda: true[:, :, ::-1]),
            *((f"heads are in another order (in {n} groups)", lambda n=n: _regroup(true, n)) for n in _divisors(true)),
        ]
    for words, change in places:
        moved = change()
        if moved.shape == mine.shape and explains(measure, mine, moved):
            return words
    for axes, words in ((tuple(range(last)), "channel"), ((last,), "token")):
        if true.ndim < 2 or min(true.shape[last], true.size // true.shape[last]) < 8:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.nan_to_num((mine * true).sum(axes, keepdims=True) / np.square(true).sum(axes, keepdims=True))
        if explains(measure, mine, factor * true):
            low, high = np.quantile(factor, (0.05, 0.95))
            return f"each {words} has a factor of its own, from {low:.4g} to {high:.4g}: {_CAUSES[words]}"
        if words == "channel" and explains(measure, mine, true + (mine - true).mean(axes, keepdims=True)):
            return "each channel has a summand of its own: a bias is missing, or one too many"
    return None


_CAUSES = {
    "channel": "another weight of a norm (1 + weight?), or scales of a quantisation",
    "token": "other statistics of a norm (epsilon, mean), or a normalisation left out",
}


def _explain_integers(mine: np.ndarray, true: np.ndarray, positions: bool) -> str | None:
    if mine.ndim == 2 and mine.shape[1] > 1:
        for by, words in ((1, "too late"), (-1, "too early")):
            if np.array_equal(np.roll(true, by, 1)[:, 1:-1], mine[:, 1:-1]):
                return f"they are one token {words}: shifted once more, or not at all"
        if positions and mine.dtype.kind in "iu":
            return describe_shifts(mine - true)
    return None


def _moved(x: np.ndarray, by: int) -> np.ndarray:
    moved = np.roll(x, by, axis=1)
    edge = 0 if by > 0 else -1
    moved[:, edge] = x[:, edge]
    return moved


def _interleave(x: np.ndarray) -> np.ndarray:
    half = x.shape[-1] // 2
    return np.stack([x[..., :half], x[..., half : 2 * half]], axis=-1).reshape(*x.shape[:-1], 2 * half)


def _divisors(x_BTHD: np.ndarray) -> list[int]:
    return [n for n in range(2, x_BTHD.shape[2]) if x_BTHD.shape[2] % n == 0]


def _regroup(x_BTHD: np.ndarray, groups: int) -> np.ndarray:
    B, T, H, D = x_BTHD.shape
    return x_BTHD.reshape(B, T, groups, H // groups, D).swapaxes(2, 3).reshape(B, T, H, D)
