"""What an array that breaks the rule looks like, in words: how large the error is, where, and which mistake gives it.

Mistakes are computed from the candidate's arrays just before. A mistake explains an array if what it gives differs from
the candidate's by no more than the allowance. `parity run` and `parity compare` both explain with this.

Legend: B batch · T tokens of a row · H query heads · D head_dim · C = D / 2 rotated pairs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from anchorline.tolerance import UNLIKELY
from jaxref.frequencies import inverse_frequencies
from jaxref.rope_spec import RopeSpec
from parity_tests.mistakes import Mistake
from parity_tests.mistakes.attention import attention_on, forward, forward_mistakes
from parity_tests.mistakes.rotation import rotate, rotation_mistakes
from parity_tests.report.measure import where_not_finite
from parity_tests.report.schema import Measure

LONGEST = 512  # tokens for which a [T, T] mask is tried
PART = 1 + UNLIKELY / 2**0.5  # what the rule allows a token of an array that inherits errors, over the whole's
_TAPS = {
    "rope_table": "RoPE's table of cos and sin",
    "embed": "embedding",
    "input_norm": "norm before attention",
    "q": "q before RoPE",
    "k": "k before RoPE",
    "q_norm": "q after its norm",
    "k_norm": "k after its norm",
    "q_rope": "q after RoPE",
    "k_rope": "k after RoPE",
    "attn": "attention output of the heads",
    "attn_out": "attention output",
    "attn_residual": "residual after attention",
    "post_norm": "norm before the MLP",
    "mlp": "MLP output",
    "residual": "residual after the MLP",
    "final_norm": "final norm",
}
_BEHIND = {  # the forward pass, where others call arrays so, too
    "loss": "mean loss",
    "tokens": "losses of the tokens",
    "stored": "weights as the model holds them after the step",
    "rates": "learning rates of the steps",
    "norms": "gradient norms of the steps",
    "counts": "numbers of visible pairs, segments and labels",
}
_RUN = {
    "lengths": "lengths that the exported config.json and tokenizer_config.json hold",
    "held_out.before": "held-out loss before training",
    "held_out.after": "held-out loss after training",
}


@dataclass(frozen=True)
class Known:
    """What explanations may look at: arrays of both sides by the oracle's names, and what is right, where it is known.

    rope: None where no mistake of RoPE is to be tried. scale: of the logits; None where none of the mask rule is.
    """

    candidate: Mapping[str, np.ndarray]
    truth: Mapping[str, np.ndarray]
    positions_BT: np.ndarray | None = None
    documents_BT: np.ndarray | None = None
    rope: RopeSpec | None = None
    scale: float | None = None


def where(measure: Measure) -> str:
    """`layer 7, k after RoPE`."""
    what = (_TAPS if measure.group == "forward" else _TAPS | _BEHIND).get(measure.tap, measure.tap)
    if measure.group == "run":
        of_model = measure.name.startswith("run.exported.")
        of_masters = measure.name.startswith("run.masters.")
        what = f"master weight {what} after the run" if of_masters else what
        what = f"exported model, {what}" if of_model else f"whole run, {_RUN.get(measure.tap, what)}"
    if measure.tap.removeprefix("losses.").isdecimal():
        return f"losses of the tokens at step {int(measure.tap.removeprefix('losses.')) + 1}"
    if measure.group == "gradients":
        what = f"gradient of {what}"
    if measure.group == "step" and measure.tap != "stored":
        what = f"{what} after one AdamW step"
    return what if measure.layer is None else f"layer {measure.layer}, {what}"


def how_much(measure: Measure, sides: tuple[np.ndarray, np.ndarray] | None = None) -> str:
    """`41 times the allowance`. sides: the array of both, where what is not finite is to have its place."""
    if not np.isfinite(measure.error):
        broken, lacks = (where_not_finite(*pair) for pair in (sides, sides[::-1])) if sides else (None, None)
        return broken or (f"finite where the truth is {lacks}" if lacks else "the error is not finite")
    if measure.allowance == 0 and measure.error == int(measure.error):
        return f"{int(measure.error)} of {int(np.prod(measure.shape))} entries differ, and none may"
    if measure.allowance == 0:
        return f"errs by {measure.error:.3g} where nothing is allowed"
    return f"{measure.ratio:.3g} times the allowance"


def sentence(measure: Measure, place: str, sides: Any, explain: Callable[[], str | None], by_token: bool) -> str:
    """One line on an array that breaks: its place, how much it errs, in which tokens, and what explains it."""
    if measure.whole <= 1 and measure.part:  # so small that every mistake of this size would explain it
        return f"{place}: {measure.part.name} errs {measure.part.ratio:.3g} times its allowance"
    explained, tokens = explain(), None
    if sides is not None and by_token and "token" not in (explained or ""):  # what speaks of tokens says which
        tokens = extent(measure, *sides)
    return "; ".join(filter(None, (f"{place}: {how_much(measure, sides)}", tokens, explained)))


def _ratios(measure: Measure, array: np.ndarray, truth: np.ndarray, kept: tuple[int, ...]) -> np.ndarray:
    """Error over allowance of each part; of a larger part in proportion. kept: the axes that number the parts."""
    others = tuple(axis for axis in range(truth.ndim) if axis not in kept)
    error, size = (np.sqrt(np.mean(np.square(x), axis=others, keepdims=True)) for x in (array - truth, truth))
    larger = np.maximum(size / _rms(size), 1.0) if size.any() else 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error > 0, error / (measure.allowance * larger), 0.0)


def erring(measure: Measure, array: np.ndarray, truth: np.ndarray, kept: tuple[int, ...]) -> np.ndarray:
    """Which parts err: by more than the rule allows a part, if the rest is then within it; else more than the whole."""
    ratios = _ratios(measure, array, truth, kept)
    rest = np.where(ratios > PART, 0.0, array - truth)
    return ratios > (PART if _rms(rest) <= measure.allowance else 1.0)


def extent(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str:
    """Which rows and tokens err."""
    wrong_BT = erring(measure, array, truth, (0, 1)).reshape(truth.shape[:2])
    B, T = truth.shape[:2]
    if wrong_BT.all() or not wrong_BT.any():
        return ""
    rows, tokens = np.flatnonzero(wrong_BT.any(1)), np.flatnonzero(wrong_BT.any(0))
    where = f" of row {rows[0]}" if len(rows) == 1 < B else ""
    if len(tokens) == 1:
        return f"at token {tokens[0]}{where} alone"
    if len(tokens) == T:
        return f"in row {rows[0]} alone" if where else ""
    first, last = int(tokens[0]), int(tokens[-1])
    if first > 0 and last == T - 1:
        return f"from token {first}{where} on"
    return f"in {len(tokens)} tokens{where} from {first} to {last}" if 2 * len(tokens) < T else ""


def explain_rotation(measure: Measure, known: Known) -> str | None:
    """Of q or k after RoPE: which positions, frequencies or pairs would give it."""
    array, truth = known.candidate[measure.name], known.truth[measure.name]
    right, mistakes = _rotations(known, measure.name.removesuffix("_rope"), array)
    if right is None or known.rope is None:
        return None
    # Where what is taken for right does not give the truth, no mistake can be told by it.
    found = _first(measure, array, mistakes) if _rms(truth - right) <= measure.allowance else None
    R = known.rope.head_dim
    return found or scaled(measure, array, truth) or _wrong_pairs(measure, array[..., :R], truth[..., :R])


def _rotations(known: Known, name: str, array: np.ndarray) -> tuple[np.ndarray | None, Iterable[Mistake]]:
    """Of `layers.0.q` after RoPE: what is right, and mistakes that may give an array."""
    source, at, rope = f"{name}_norm" if f"{name}_norm" in known.truth else name, known.positions_BT, known.rope
    if rope is None or at is None or not _as_in_truth(known, source) or known.truth[source].shape[:2] != at.shape:
        return None, ()
    documents_BT = known.documents_BT if known.documents_BT is not None else np.ones_like(at)
    mistakes = rotation_mistakes(known.candidate[source], at, documents_BT, rope, array)
    return rotated(known.truth[source], at, rope), mistakes


def rotated(x_BTHD: np.ndarray, positions_BT: np.ndarray, rope: RopeSpec) -> np.ndarray:
    """q or k after the right rotation."""
    return rotate(x_BTHD, positions_BT, *inverse_frequencies(rope, int(positions_BT.max()) + 1))


def _wrong_pairs(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """Pairs that err by more than the whole array may: the roundings of pairs that turn fast are above the mean."""
    first_C, second_C = np.split(np.square(array - truth).mean((0, 1, 2)), 2)
    C = len(first_C)
    wrong_C = np.sqrt((first_C + second_C) / (2 * C)) > measure.allowance
    if wrong_C.all() or not wrong_C.any():
        return None
    cause = f"other frequencies{' or positions' if wrong_C[0] else ''}"  # the first pairs turn fastest
    return f"of {C} rotated pairs only {_ranges(wrong_C.nonzero()[0])} are wrong: {cause}"


def _ranges(numbers: np.ndarray) -> str:
    """`3, 7 to 12`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def explain_attention(measure: Measure, known: Known) -> str | None:
    """Of the heads' output: which mask, scale or order of heads would give it."""
    stem, ids = measure.name.removesuffix(".attn"), known.documents_BT
    if known.scale is None or ids is None or ids.shape[1] > LONGEST:
        return None
    array, truth = known.candidate[measure.name], known.truth[measure.name]
    for q, k in (("q_rope", "k_rope"), ("q_norm", "k_norm"), ("q", "k")):  # the last two in a model without RoPE
        names = (f"{stem}.{q}", f"{stem}.{k}", f"{stem}.v")
        right, mine = ([side[n] for n in names if n in side] for side in (known.truth, known.candidate))
        fits = _as_in_truth(known, *names, measure.name) and right[0].shape == truth.shape
        if not fits or any(x.shape[:2] + x.shape[3:] != ids.shape + truth.shape[3:] for x in right):
            continue
        if right[1].shape != right[2].shape or truth.shape[2] % right[1].shape[2]:
            continue
        for scale in (known.scale, _fitted_scale(right, truth, ids, known.scale)):
            if _rms(truth - _out(right, ids, scale)) > measure.allowance:
                continue  # what is taken for right is not
            if explains(measure, array, _out(mine, ids, scale)):
                return None  # what went in was wrong
            own = _fitted_scale(mine, array, ids, scale)
            words = f"the scale of the logits is {own:.3g}, {own / scale:.3g} times what is right"
            found = _first(measure, array, _attention_mistakes(known, stem, mine, ids, scale))
            return found or (words if explains(measure, array, _out(mine, ids, own)) else None)
    return None


def _attention_mistakes(known: Known, stem: str, qkv: Sequence[Any], ids: Any, scale: float) -> Iterator[Mistake]:
    """Wrong forward passes; and right ones of q and k that RoPE turns wrongly, where what it gives was not recorded."""
    yield from forward_mistakes(qkv[0], qkv[1], qkv[2], ids, scale)
    sides = [_rotations(known, f"{stem}.{name}", x)[1] for name, x in zip("qk", qkv, strict=False)]
    for (words, q), (_, k) in zip(*sides, strict=False):
        yield words, lambda q=q, k=k: {"out": _out((q()["out"], k()["out"], qkv[2]), ids, scale)}


def _out(qkv: Sequence[np.ndarray], ids_BT: np.ndarray, scale: float) -> np.ndarray:
    return np.asarray(forward(attention_on(qkv[0], qkv[1], qkv[2], ids_BT, scale))["out"])


def _fitted_scale(qkv: Sequence[np.ndarray], out: np.ndarray, ids_BT: np.ndarray, scale: float) -> float:
    """The scale of the logits, 1/64 to 64 times `scale`, that brings the first head nearest to `out`: by bisection."""
    first, best = [x[:, :, :1] for x in qkv], 0.0
    for steps in (np.linspace(-6, 6, 49), *([-step, 0.0, step] for step in 2.0 ** -np.arange(3, 20))):
        best += min(steps, key=lambda step: _rms(out[:, :, :1] - _out(first, ids_BT, scale * 2.0 ** (best + step))))
    return scale * 2.0**best


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _as_in_truth(known: Known, *names: str) -> bool:
    """Whether the candidate has these arrays at all, in the shape of the truth."""
    both = all(name in known.candidate and name in known.truth for name in names)
    return both and all(known.candidate[name].shape == known.truth[name].shape for name in names)


def _first(measure: Measure, array: np.ndarray, mistakes: Iterable[Mistake]) -> str | None:
    return next((words for words, compute in mistakes if explains(measure, array, compute()["out"])), None)


def explains(measure: Measure, array: np.ndarray, mistake: np.ndarray) -> bool:
    """Whether the array is what a mistake gives, in all parts, and half of its error goes: chance takes a little."""
    left = _rms(array - mistake)
    if not left <= min(measure.allowance, measure.error / 2):
        return False
    parts = [(axis,) for axis in range(array.ndim)] + [(0, 1)] * (array.ndim > 2)
    return left == 0 or all((_ratios(measure, array, mistake, kept) <= PART).all() for kept in parts)


def scaled(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """`everything is 2 times what it should be`, or None."""
    if not array.any():
        return "it is all zeros"
    factor = float(np.vdot(array, truth) / np.vdot(truth, truth)) if truth.any() else 1.0
    larger = max(1.0, abs(factor))  # and so are its roundings
    if truth.size > 1 and f"{factor:.4g}" != "1" and explains(measure, array / larger, factor / larger * truth):
        return f"everything is {factor:.4g} times what it should be"
    return None
