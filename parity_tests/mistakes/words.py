"""What an array that breaks the rule looks like, in words: how large the error is, where, and which mistake gives it.

Mistakes are computed from the candidate's arrays just before. A mistake explains an array if what it gives differs from
the candidate's by no more than the allowance. `parity run` and `parity compare` both explain with this.

Legend: B batch · T tokens of a row · H query heads · D head_dim · C = D / 2 rotated pairs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxref.rope_spec import RopeSpec
from parity_tests.mistakes import Mistake, explanations
from parity_tests.mistakes.attention import attention_on, forward, forward_mistakes
from parity_tests.mistakes.rotation import rotation_mistakes
from parity_tests.report.measure import where_not_finite
from parity_tests.report.schema import Measure

LONGEST = 512  # tokens for which a [T, T] mask is tried


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
    what = _TAPS.get(measure.tap, measure.tap)
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
        broken = where_not_finite(*sides) if sides else None
        return broken or "the error is not finite"
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
        tokens = extent(np.abs(sides[0] - sides[1]), measure)
    return "; ".join(filter(None, (f"{place}: {how_much(measure, sides)}", tokens, explained)))


def extent(error: np.ndarray, measure: Measure) -> str:
    """Which rows and tokens err: those whose own root mean square exceeds the allowance of the whole."""
    by_token_BT = np.sqrt(np.mean(np.square(error), axis=tuple(range(2, error.ndim))))
    wrong_BT = by_token_BT > measure.allowance
    B, T = wrong_BT.shape
    if wrong_BT.all() or not wrong_BT.any():
        return ""
    rows, tokens = wrong_BT.any(1).nonzero()[0], wrong_BT.any(0).nonzero()[0]
    where = f" of row {rows[0]}" if len(rows) < B else ""
    if len(tokens) == 1:
        return f"at token {tokens[0]}{where} alone"
    if len(tokens) == T:
        return f"in row {rows[0]} alone" if where else ""
    first, last = int(tokens[0]), int(tokens[-1])
    if last == T - 1:
        return f"from token {first}{where} on"
    return f"in {len(tokens)} tokens{where} from {first} to {last}"


def explain_rotation(measure: Measure, known: Known) -> str | None:
    """Of q or k after RoPE: which positions, frequencies or pairs would give it."""
    stem = measure.name.removesuffix("_rope")
    source = f"{stem}_norm" if f"{stem}_norm" in known.truth else stem
    if known.rope is None or known.positions_BT is None or not _as_in_truth(known, source):
        return None
    x_BTHD, array, truth = (
        np.asarray(x, np.float64)
        for x in (known.candidate[source], known.candidate[measure.name], known.truth[measure.name])
    )
    documents_BT = known.documents_BT if known.documents_BT is not None else np.ones_like(known.positions_BT)
    mistakes = rotation_mistakes(x_BTHD, known.positions_BT, documents_BT, known.rope, array)
    R = known.rope.head_dim
    wrong = scaled(measure, array, truth) or _wrong_pairs(measure, array[..., :R], truth[..., :R])
    return _first(measure, array, mistakes) or wrong


def _wrong_pairs(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """Pairs that err by more than the whole array may: the roundings of pairs that turn fast are above the mean."""
    first_C, second_C = np.split(np.square(array - truth).mean((0, 1, 2)), 2)
    C = len(first_C)
    wrong_C = np.sqrt((first_C + second_C) / (2 * C)) > measure.allowance
    if wrong_C.all() or not wrong_C.any():
        return None
    return f"of {C} rotated pairs only {_ranges(wrong_C.nonzero()[0])} are wrong: other frequencies"


def _ranges(numbers: np.ndarray) -> str:
    """`3, 7 to 12`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def explain_attention(measure: Measure, known: Known) -> str | None:
    """Of the heads' output: which mask, scale or order of heads would give it."""
    stem = measure.name.removesuffix(".attn")
    names = (f"{stem}.q_rope", f"{stem}.k_rope", f"{stem}.v")
    ids = known.documents_BT
    if known.scale is None or ids is None or ids.shape[1] > LONGEST or not _as_in_truth(known, *names):
        return None
    q, k, v, array = (np.asarray(known.candidate[name], np.float64) for name in (*names, measure.name))
    if explains(measure, array, np.asarray(forward(attention_on(q, k, v, ids, known.scale))["out"])):
        return None  # what went in was wrong
    return _first(measure, array, forward_mistakes(q, k, v, ids, known.scale))


def _as_in_truth(known: Known, *names: str) -> bool:
    """Whether the candidate has these arrays at all, in the shape of the truth."""
    both = all(name in known.candidate and name in known.truth for name in names)
    return both and all(known.candidate[name].shape == known.truth[name].shape for name in names)


def _first(measure: Measure, array: np.ndarray, mistakes: Iterable[Mistake]) -> str | None:
    found = explanations(mistakes, lambda wrong: 0.0 if explains(measure, array, wrong["out"]) else np.inf)
    return next((words for words, _ in found), None)


def explains(measure: Measure, array: np.ndarray, mistake: np.ndarray) -> bool:
    """Whether the array is, within its allowance, what a mistake gives."""
    return bool(np.sqrt(np.mean(np.square(array - mistake))) <= measure.allowance)


def scaled(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """`everything is 2 times what it should be`, or None."""
    if not array.any():
        return "it is all zeros"
    factor = float(np.vdot(array, truth) / np.vdot(truth, truth)) if truth.any() else 1.0
    if truth.size > 1 and f"{factor:.4g}" != "1" and explains(measure, array, factor * truth):
        return f"everything is {factor:.4g} times what it should be"
    return None
