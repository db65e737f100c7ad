"""What an array that breaks looks like: mistakes that need nothing but the arrays of both dumps.

A mistake is named only if it gives the candidate's numbers within the allowance.

Legend: B batch · T tokens of a row · M model width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anchorline.errors import UserError
from jaxref.rope_spec import RopeSpec
from parity_tests.comparing.judging import Sides
from parity_tests.mistakes.rotation import describe_shifts
from parity_tests.mistakes.words import Known, erring, explain_attention, explain_rotation, explains, rotated, scaled
from parity_tests.report.schema import Measure

MOST = 2**24  # values of an array that is explained
KEPT = 2**20  # values of an array that is kept while others are tried
LEAST = 8  # values that share a factor
NEAR = 24  # arrays before it that are tried in its place


class Loaded(Mapping[str, np.ndarray]):
    """Arrays of a dump by name, float64, as the judge sees them, read when asked for; none of more than `MOST` values.
    q and k after RoPE, which no module puts out, are computed from those before it, where they are not recorded."""

    def __init__(self, arrays: Mapping[str, Any], view: Callable[[str, Any], np.ndarray]) -> None:
        self._arrays, self._view, self._kept = arrays, view, {}
        self.turn: Callable[[np.ndarray], np.ndarray] | None = None

    def __getitem__(self, name: str) -> np.ndarray:
        if name in self._kept:
            return self._kept[name]
        stem = name.removesuffix("_rope")
        if name not in self._arrays and name != stem and self.turn is not None:
            return self.turn(self[f"{stem}_norm" if f"{stem}_norm" in self._arrays else stem])
        x = self._arrays[name].load()
        if x.size > MOST:
            raise KeyError(name)
        x = self._view(name, np.asarray(x, np.float64 if self._arrays[name].dtype else None))
        return x if x.size > KEPT else self._kept.setdefault(name, x)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def know(sides: Mapping[str, Sides], config: Mapping[str, Any], view: Callable[[str, Any], np.ndarray]) -> Known:
    """What explanations may look at. Where the dumps lack position or document ids, rows of one document are tried;
    where these are not one integer for each token, neither RoPE nor the mask is. view: orders the axes of an array."""
    mine, true = (Loaded({name: own[side] for name, own in sides.items()}, view) for side in (0, 1))
    layer = next((true[n] for n in sides if n.endswith((".q", ".attn")) and n in true and true[n].ndim == 4), None)
    if layer is None:
        return Known(mine, true)
    B, T, _, D = layer.shape
    ids = {"position_ids": np.broadcast_to(np.arange(T), (B, T)), "document_ids": np.ones((B, T), int)}
    for what in ids:
        if (name := next((n for n in (f"inputs.{what}", what) if n in sides), None)) is not None:
            x = true[name]  # of [T], [1, T] or [B, 1, T], also as floats
            fits = x.shape in ((T,), (1, T), (B, T), (B, 1, T)) and (x == np.round(x)).all()
            ids[what] = np.broadcast_to(x.astype(int).reshape(-1, T), (B, T)) if fits else None
    positions, documents = ids.values()
    rope = None if positions is None else _rope(config, D)
    if rope is not None and positions is not None:

        def turn(x: np.ndarray) -> np.ndarray:
            if x.ndim != 4 or x.shape[:2] != positions.shape:
                raise KeyError("its axes are not B, T, heads and channels")
            return rotated(x, positions, rope)

        mine.turn = true.turn = turn
    return Known(mine, true, positions, documents, rope, D**-0.5)


def _rope(config: Mapping[str, Any], head_dim: int) -> RopeSpec | None:
    """By the config, else the commonest, of which a mistake is named only if it gives the numbers. None: no pairs."""
    for given in (dict(config) | {"head_dim": head_dim}, {"head_dim": head_dim, "rope_theta": 1e4}):
        try:
            return RopeSpec.from_hf(given)
        except (UserError, KeyError, TypeError, AttributeError):
            continue
    return None


def explain(measure: Measure, known: Known, before: list[str], names: Sequence[str]) -> str | None:
    """Words for the first mistake that gives the candidate's array. before: names that come first. names: of axes."""
    name = measure.name
    if np.prod(measure.shape) > MOST or name not in known.candidate or not measure.shape:
        return None
    mine, true = known.candidate[name], known.truth[name]
    if measure.allowance == 0:
        return _explain_integers(mine, true, "position" in name)
    if not (np.isfinite(mine) & np.isfinite(true)).all():
        return None
    how = {"attn": explain_attention, "q_rope": explain_rotation, "k_rope": explain_rotation}.get(measure.tap)
    found = how and mine.ndim == 4 and how(measure, known)
    found = found or scaled(measure, mine, true) or _explain_by_others(measure, known, before)
    places = (words for words, x in _moves(true, names) if x.shape == mine.shape and explains(measure, mine, x))
    return found or next(places, None) or _explain_by_parts(measure, mine, true, names)


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


def _moves(true: np.ndarray, names: Sequence[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The right numbers in other places."""
    if "token" in names[1:2]:
        yield "every token has what belongs to the token before it", np.concatenate([true[:, :1], true[:, :-1]], 1)
        yield "every token has what belongs to the token behind it", np.concatenate([true[:, 1:], true[:, -1:]], 1)
    if true.ndim >= 2:
        yield "rows and columns are exchanged", true.swapaxes(-1, -2)
        yield "the two halves of the last axis are exchanged", np.roll(true, true.shape[-1] // 2, axis=-1)
        pairs = np.concatenate([true[..., ::2], true[..., 1::2]], axis=-1)
        yield "the last axis has halves as pairs, where neighbours are right", pairs
        if true.shape[-1] % 2 == 0:
            halves = np.stack(np.split(true, 2, axis=-1), axis=-1).reshape(true.shape)
            yield "the last axis has neighbours as pairs, where halves are right", halves
    if "head" in names[2:3]:
        yield "heads are in the opposite order", true[:, :, ::-1]
        B, T, H, D = true.shape
        for n in (n for n in range(2, H) if H % n == 0):
            moved = true.reshape(B, T, n, H // n, D).swapaxes(2, 3).reshape(true.shape)
            yield f"heads are in another order (in {n} groups)", moved


def _explain_by_parts(measure: Measure, mine: np.ndarray, true: np.ndarray, names: Sequence[str]) -> str | None:
    """A factor, or a summand, of its own for each head, channel, token, ... or for some: that with the fewest."""
    n = true.ndim
    runs = [tuple(range(start, stop)) for start in range(n) for stop in range(start + 1, n + 1)]
    for kept in sorted(runs, key=lambda kept: np.prod([true.shape[axis] for axis in kept])):
        count = int(np.prod([true.shape[axis] for axis in kept]))
        if true.size < LEAST * count or count < 2:  # so few values fit any factor
            continue
        others = tuple(axis for axis in range(n) if axis not in kept)
        square = np.square(true).sum(others, keepdims=True)
        factor = (mine * true).sum(others, keepdims=True) / np.where(square > 0, square, 1.0)
        summand = (mine - true).mean(others, keepdims=True)
        wrong = erring(measure, mine, true, kept)
        # The last is how much larger the roundings are.
        ways = [("factor", factor, true * np.where(wrong, factor, 1.0), np.maximum(1.0, np.abs(factor)))]
        ways += [("summand", summand, true + np.where(wrong, summand, 0.0), 1.0)] * (n - 1 in kept)
        for what, x, gives, by in ways:
            if not wrong.any() or not explains(measure, mine / by, gives / by):
                continue
            first = np.unravel_index(int(wrong.argmax()), wrong.shape)
            where = " of ".join(f"{names[axis]} {first[axis]}" for axis in reversed(kept))
            shown = " to ".join(dict.fromkeys(f"{value:.4g}" for value in (x[wrong].min(), x[wrong].max())))
            if wrong.sum() == 1:
                return f"{where} alone has a {what} of its own, {shown}"
            own = [names[axis] for axis in reversed(kept) if axis or len(kept) == 1]  # each token, not each of a row
            words, most = " of a ".join(own), 2 * wrong.sum() > count
            some = f"each {words}" if most else f"of {count:,} {words}s {wrong.sum():,}, the first {where}, each"
            return f"{some} has a {what} of its own, from {shown}{_CAUSES.get((what, own[0]), '') if most else ''}"
    return None


_CAUSES = {
    ("summand", "channel"): ": a bias is missing, or one too many",
    ("factor", "channel"): ": another weight of a norm (1 + weight?), or scales of a quantisation",
    ("factor", "token"): ": other statistics of a norm (epsilon, mean), or a normalisation left out",
}


def _explain_integers(mine: np.ndarray, true: np.ndarray, positions: bool) -> str | None:
    if mine.ndim == 2 and mine.shape[1] > 1:
        for by, words in ((1, "too late"), (-1, "too early")):
            if np.array_equal(np.roll(true, by, 1)[:, 1:-1], mine[:, 1:-1]):
                return f"they are one token {words}: shifted once more, or not at all"
        if positions and mine.dtype.kind in "iu":
            return describe_shifts(mine - true)
    return "the same values in another order" if np.array_equal(np.sort(mine, None), np.sort(true, None)) else None
