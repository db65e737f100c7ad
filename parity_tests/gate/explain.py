"""Explain the first divergence: where it is, how large, in which tokens, and which mistake would give it.

Mistakes are made on purpose, in float64, from the candidate's arrays just before the divergence. A mistake explains the
divergence if what it gives differs from the candidate by no more than the allowance.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · C = D / 2 rotated pairs.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np

from jaxref.rope import inverse_frequencies
from jaxref.rope_spec import RopeSpec
from parity_tests.gate.case import GateCase
from parity_tests.gate.truth import Arrays, OracleArrays
from parity_tests.report.schema import Measure
from parity_tests.wrong_attention import attention_on, forward, wrong_passes

_TAPS = {
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
}


def describe(case: GateCase, measure: Measure, truth: np.ndarray, candidate: Arrays, oracle: OracleArrays) -> str:
    """One line: `layer 7, k after RoPE: 41 times the allowance; positions are off by +1 from token 512 on`.

    Args:
        case: what was run.
        measure: the first that breaks the rule.
        truth: its truth.
        candidate, oracle: all arrays of both sides.
    """
    if measure.whole <= 1 and measure.part:  # so small that every mistake of this size would explain it
        return f"{_where(measure)}: {measure.part.name} errs {measure.part.ratio:.3g} times its allowance"
    explained = cause(case, measure, truth, candidate, oracle)
    by_token = measure.group == "forward" or measure.name in ("loss.tokens", "inputs.shift_labels")
    # An explanation that speaks of tokens says which.
    extent = by_token and not (explained and "token" in explained)
    where = _extent(np.abs(candidate[measure.name] - truth), measure) if extent else None
    return "; ".join(filter(None, (f"{_where(measure)}: {_how_much(measure)}", where, explained)))


def _where(measure: Measure) -> str:
    what = _TAPS.get(measure.tap, measure.tap)
    if measure.group == "trajectory" and measure.tap.isdecimal():
        return f"losses of the tokens at step {int(measure.tap) + 1}"
    if measure.group == "gradients":
        what = f"gradient of {what}"
    if measure.group == "step" and measure.tap != "stored":
        what = f"{what} after one AdamW step"
    return what if measure.layer is None else f"layer {measure.layer}, {what}"


def _how_much(measure: Measure) -> str:
    if measure.allowance == 0 and measure.error == int(measure.error):
        return f"{int(measure.error)} of {int(np.prod(measure.shape))} entries differ, and none may"
    if not np.isfinite(measure.ratio):
        return "the error is not finite"
    return f"{measure.ratio:.3g} times the allowance"


def _extent(error: np.ndarray, measure: Measure) -> str:
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


# -- mistakes ---------------------------------------------------------------------------------------------------------


SHIFTS = (0, *(sign * by for by in range(1, 9) for sign in (1, -1)))
LONGEST = 512  # tokens for which a [T, T] mask is tried


def cause(case: GateCase, measure: Measure, truth: np.ndarray, candidate: Arrays, oracle: OracleArrays) -> str | None:
    """Words for the first mistake that explains the measure, or None."""
    array = candidate[measure.name]
    if not np.isfinite(array).all():
        return None
    if measure.tap in ("q_rope", "k_rope"):
        return _rotation(case, measure, candidate, oracle)
    if measure.tap == "attn":
        return _attention(case, measure, candidate, oracle) or _scaled(measure, array, truth)
    if measure.name == "trajectory.rates":
        return _rates(measure, array, truth)
    if measure.name == "inputs.position_ids":
        return _shifts(array - truth)
    if measure.name == "loss.tokens":
        return _labels(array, truth)
    if measure.group == "step":
        before = candidate.get(f"step.before.{measure.name.removeprefix('step.')}")
        return None if before is None else _update(measure, array, truth, before)
    return None if measure.allowance == 0 else _scaled(measure, array, truth)


def _update(measure: Measure, array: np.ndarray, truth: np.ndarray, before: np.ndarray) -> str | None:
    if np.array_equal(array, before):
        return "the step changes nothing"
    decay = float(np.vdot(array - truth, before) / np.vdot(before, before))
    if _explains(measure, array, truth + decay * before):
        return "weight decay is applied and should not be" if decay < 0 else "weight decay is left out"
    factor = float(np.vdot(array - before, truth - before) / np.vdot(truth - before, truth - before))
    if _explains(measure, array, before + factor * (truth - before)):
        return f"the update is {factor:.4g} times what it should be"
    return None


def _rates(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    if _explains(measure, array[:-1], truth[1:]):
        return "each step has the rate of the step after it"
    if _explains(measure, array[1:], truth[:-1]):
        return "each step has the rate of the step before it"
    wrong = np.flatnonzero(np.abs(array - truth) > measure.allowance)
    return (
        f"of {len(array)} steps {len(wrong)} have a wrong rate, the first is step {wrong[0] + 1}"
        if len(wrong)
        else None
    )


def _explains(measure: Measure, array: np.ndarray, mistake: np.ndarray) -> bool:
    return bool(np.sqrt(np.mean(np.square(array - mistake))) <= measure.allowance)


def _as_in_truth(candidate: Arrays, oracle: OracleArrays, *names: str) -> bool:
    """Whether the candidate has these arrays at all, in the shape of the truth."""
    return all(name in candidate and candidate[name].shape == oracle.truth[name].shape for name in names)


def _scaled(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    if not array.any():
        return "it is all zeros"
    factor = float(np.vdot(array, truth) / np.vdot(truth, truth)) if truth.any() else 1.0
    if truth.size > 1 and factor != 1 and _explains(measure, array, factor * truth):
        return f"everything is {factor:.4g} times what it should be"
    return None


def _labels(array: np.ndarray, truth: np.ndarray) -> str | None:
    lost, gained = int(((array == 0) & (truth != 0)).sum()), int(((array != 0) & (truth == 0)).sum())
    parts = [f"{lost} tokens have no loss that should have one"] * bool(lost)
    parts += [f"{gained} tokens have a loss that should have none"] * bool(gained)
    return " and ".join(parts) or None


# -- rotation ----------------------------------------------------------------------------------------------------------


def _rotation(case: GateCase, measure: Measure, candidate: Arrays, oracle: OracleArrays) -> str | None:
    stem = measure.name.removesuffix("_rope")
    source = f"{stem}_norm" if f"{stem}_norm" in oracle.truth else stem
    if not _as_in_truth(candidate, oracle, source):
        return None
    x_BTHD = np.asarray(candidate[source], np.float64)
    array, truth = candidate[measure.name], oracle.truth[measure.name]
    positions, documents = oracle.exact["inputs.position_ids"], oracle.exact["inputs.document_ids"]
    rope = case.decoder_config.rope  # the truth's
    frequencies, scaling = inverse_frequencies(rope, int(positions.max()) + 1)

    for words, moved in _positions(positions, documents, case.spec.tokens):
        wrong = not np.array_equal(moved, positions)
        if wrong and _explains(measure, array, _rotate(x_BTHD, moved, frequencies, scaling)):
            return words
    shifted = np.stack([_rotate(x_BTHD, positions + shift, frequencies, scaling) for shift in SHIFTS])
    errors_SBT = np.square(shifted - array).sum((-2, -1))
    shifts_BT = np.asarray(SHIFTS)[errors_SBT.argmin(0)]
    if _explains(measure, array, _rotate(x_BTHD, positions + shifts_BT, frequencies, scaling)):
        return _shifts(shifts_BT)
    for words, mistake in _wrong_rotations(x_BTHD, positions, rope, frequencies, scaling):
        if _explains(measure, array, mistake()):
            return words
    return _scaled(measure, array, truth) or _wrong_pairs(measure, array, truth)


def _positions(positions: np.ndarray, documents: np.ndarray, tokens: int) -> Iterator[tuple[str, np.ndarray]]:
    index = np.broadcast_to(np.arange(tokens), positions.shape)
    begins = np.concatenate([np.ones((len(documents), 1), bool), documents[:, 1:] != documents[:, :-1]], axis=1)
    yield "position_ids are ignored: tokens take their index in the row", index
    yield "positions restart in every document", index - np.maximum.accumulate(np.where(begins, index, 0), axis=1)
    yield "every row takes the positions of the first", np.broadcast_to(positions[:1], positions.shape)
    yield "positions are rounded to bfloat16", positions.astype(ml_dtypes.bfloat16).astype(np.float64)
    yield "nothing is rotated", np.zeros_like(positions)
    for length in 2 ** np.arange(9, 18):
        yield f"positions are clamped to {length - 1}", positions.clip(max=length - 1)


def _shifts(shifts_BT: np.ndarray) -> str | None:
    moved = np.flatnonzero(shifts_BT.any(0))
    if not len(moved):
        return None
    sizes = sorted({int(shift) for shift in shifts_BT[shifts_BT != 0]}, key=abs)
    by = f"by {sizes[0]:+d}" if len(sizes) == 1 else f"by up to {sizes[-1]:+d}"
    return (
        f"positions are off {by} from token {moved[0]} on"
        if len(moved) > 1
        else f"the position of token {moved[0]} is off {by}"
    )


def _rotate(x_BTHD: np.ndarray, positions_BT: np.ndarray, frequencies_C: np.ndarray, scaling: float) -> np.ndarray:
    return _turn(x_BTHD, np.asarray(positions_BT, np.float64)[..., None] * frequencies_C, scaling)


def _turn(x_BTHD: np.ndarray, angle_BTC: np.ndarray, scaling: float) -> np.ndarray:
    a, b = np.split(x_BTHD, 2, axis=-1)
    cos, sin = (scaling * table(angle_BTC)[:, :, None] for table in (np.cos, np.sin))
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _interleave(x_BTHD: np.ndarray) -> np.ndarray:
    """Neighbours become halves."""
    return np.concatenate([x_BTHD[..., ::2], x_BTHD[..., 1::2]], axis=-1)


def _wrong_rotations(
    x_BTHD: np.ndarray, positions: np.ndarray, rope: RopeSpec, frequencies: np.ndarray, scaling: float
) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    seq_len = int(positions.max()) + 1
    half = len(frequencies) // 2

    def with_frequencies(other: np.ndarray) -> Callable[[], np.ndarray]:
        return lambda: _rotate(x_BTHD, positions, other, scaling)

    def neighbours() -> np.ndarray:
        turned = _rotate(_interleave(x_BTHD), positions, frequencies, scaling)
        return np.stack(np.split(turned, 2, axis=-1), axis=-1).reshape(x_BTHD.shape)

    angle = positions[..., None] * frequencies
    rounded = angle.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    stored = frequencies.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    plain = RopeSpec(head_dim=rope.head_dim, theta=rope.theta)
    yield "the rotation goes in the other direction", lambda: _rotate(x_BTHD, -positions, frequencies, scaling)
    yield "neighbours are rotated as pairs, not the two halves of the head", neighbours
    yield "angles are rounded to bfloat16", lambda: _turn(x_BTHD, rounded, scaling)
    yield "inverse frequencies are rounded to bfloat16", with_frequencies(stored)
    yield "the attention factor is missing", lambda: _rotate(x_BTHD, positions, frequencies, 1.0)
    yield f"RoPE is not scaled: {rope.rope_type} is ignored", with_frequencies(inverse_frequencies(plain)[0])
    yield "frequencies are divided by the factor twice", with_frequencies(frequencies / (rope.factor or 1.0))
    yield (
        "half of the head is not rotated",
        with_frequencies(np.where(np.arange(len(frequencies)) < half, frequencies, 0.0)),
    )
    for factor in (10.0, 0.1, 50.0, 100.0):
        other = replace(rope, theta=rope.theta * factor) if rope.theta * factor > 1 else rope
        yield f"theta is off by a factor of {factor:g}", with_frequencies(inverse_frequencies(other, seq_len)[0])


def _wrong_pairs(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """Pairs that err by more than the whole array may: the roundings of pairs that turn fast are above the mean."""
    first_C, second_C = np.split(np.square(array - truth).mean((0, 1, 2)), 2)
    square_C = first_C + second_C
    C = len(square_C)
    wrong_C = np.sqrt(square_C / (2 * C)) > measure.allowance
    if wrong_C.all() or not wrong_C.any():
        return None
    return f"of {C} rotated pairs only {_ranges(wrong_C.nonzero()[0])} are wrong: other frequencies"


def _ranges(numbers: np.ndarray) -> str:
    """`3, 7 to 12`."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention(case: GateCase, measure: Measure, candidate: Arrays, oracle: OracleArrays) -> str | None:
    if case.spec.tokens > LONGEST:
        return None
    stem = measure.name.removesuffix(".attn")
    names = (f"{stem}.q_rope", f"{stem}.k_rope", f"{stem}.v")
    if not _as_in_truth(candidate, oracle, *names):
        return None
    q, k, v = (candidate[name] for name in names)
    documents = oracle.exact["inputs.document_ids"]
    array = candidate[measure.name]
    if _explains(measure, array, np.asarray(forward(attention_on(q, k, v, documents))["out"])):
        return None  # what went in was wrong
    for words, wrong in wrong_passes(documents, q.shape[3] ** -0.5):
        if _explains(measure, array, np.asarray(wrong(q, k, v)["out"])):
            return words
    return None
