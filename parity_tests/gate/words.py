"""The first divergence of a case in words: where it is, how large, in which tokens, and which mistake would give it.

Mistakes are computed from the candidate's arrays just before the divergence. A mistake explains the divergence if what
it gives differs from the candidate by no more than the allowance.

Legend: B batch · T tokens of a row · H query heads · D head_dim · C = D / 2 rotated pairs.
"""

from collections.abc import Iterable

import numpy as np

from parity_tests.gate.case import GateCase
from parity_tests.gate.truth import OracleArrays
from parity_tests.mistakes import Mistake, explanations
from parity_tests.mistakes.attention import attention_on, forward, forward_mistakes
from parity_tests.mistakes.rotation import describe_shifts, rotation_mistakes
from parity_tests.oracle import Arrays, first_step
from parity_tests.report.schema import Measure

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
}
_RUN = {
    "length": "length that the exported config.json holds",
    "held_out.before": "held-out loss before training",
    "held_out.after": "held-out loss after training",
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
    by_token |= measure.name.startswith(("run.inputs.", "run.losses."))
    # An explanation that speaks of tokens says which.
    extent = by_token and not (explained and "token" in explained)
    where = _extent(np.abs(candidate[measure.name] - truth), measure) if extent else None
    return "; ".join(filter(None, (f"{_where(measure)}: {_how_much(measure)}", where, explained)))


def _where(measure: Measure) -> str:
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


LONGEST = 512  # tokens for which a [T, T] mask is tried


def cause(case: GateCase, measure: Measure, truth: np.ndarray, candidate: Arrays, oracle: OracleArrays) -> str | None:
    """Return words for the first mistake that explains the measure, or None."""
    array = candidate[measure.name]
    if not (np.isfinite(array) & np.isfinite(truth)).all():
        return None
    if measure.group == "run" and measure.tap in ("q_rope", "k_rope", "attn"):
        return _scaled(measure, array, truth)  # what went in is that of other rows
    if measure.tap in ("q_rope", "k_rope"):
        return _explain_rotation(case, measure, candidate, oracle)
    if measure.tap == "attn":
        return _explain_attention(case, measure, candidate, oracle) or _scaled(measure, array, truth)
    if measure.tap == "rates":
        return _explain_rates(measure, array, truth)
    if measure.tap == "position_ids":
        return describe_shifts(array - truth)
    if measure.name == "loss.tokens":
        return _explain_labels(array, truth)
    if measure.group == "trajectory":
        return _explain_norms(case, measure, array, truth) if measure.tap == "norms" else _explain_losses(measure)
    if measure.group == "step":
        before = candidate.get(f"step.before.{measure.name.removeprefix('step.')}")
        if before is None:
            return None
        clipped = None if np.array_equal(array, before) else _explain_clipping(case, measure, array, candidate)
        return clipped or _explain_update(measure, array, truth, before)
    return None if measure.allowance == 0 else _scaled(measure, array, truth)


def _explain_rotation(case: GateCase, measure: Measure, candidate: Arrays, oracle: OracleArrays) -> str | None:
    stem = measure.name.removesuffix("_rope")
    source = f"{stem}_norm" if f"{stem}_norm" in oracle.truth else stem
    if not _as_in_truth(candidate, oracle, source):
        return None
    x_BTHD, array, truth = (
        np.asarray(candidate[source], np.float64),
        candidate[measure.name],
        oracle.truth[measure.name],
    )
    positions, documents = oracle.exact["inputs.position_ids"], oracle.exact["inputs.document_ids"]
    mistakes = rotation_mistakes(x_BTHD, positions, documents, case.decoder_config.rope, array)
    R = case.decoder_config.rope.head_dim
    wrong = _scaled(measure, array, truth) or _wrong_pairs(measure, array[..., :R], truth[..., :R])
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


def _explain_attention(case: GateCase, measure: Measure, candidate: Arrays, oracle: OracleArrays) -> str | None:
    stem = measure.name.removesuffix(".attn")
    names = (f"{stem}.q_rope", f"{stem}.k_rope", f"{stem}.v")
    if case.spec.tokens > LONGEST or not _as_in_truth(candidate, oracle, *names):
        return None
    config = case.decoder_config
    scale: float = config.scale or config.head_dim**-0.5
    if config.windows[measure.layer or 0] is not None or config.softcap is not None or config.sinks:
        return None  # the mistakes below are those of the mask rule alone
    q, k, v = (candidate[name] for name in names)
    documents, array = oracle.exact["inputs.document_ids"], candidate[measure.name]
    if _explains(measure, array, np.asarray(forward(attention_on(q, k, v, documents, scale))["out"])):
        return None  # what went in was wrong
    return _first(measure, array, forward_mistakes(q, k, v, documents, scale))


def _as_in_truth(candidate: Arrays, oracle: OracleArrays, *names: str) -> bool:
    """Whether the candidate has these arrays at all, in the shape of the truth."""
    return all(name in candidate and candidate[name].shape == oracle.truth[name].shape for name in names)


def _first(measure: Measure, array: np.ndarray, mistakes: Iterable[Mistake]) -> str | None:
    found = explanations(mistakes, lambda wrong: 0.0 if _explains(measure, array, wrong["out"]) else np.inf)
    return next((words for words, _ in found), None)


def _explains(measure: Measure, array: np.ndarray, mistake: np.ndarray) -> bool:
    return bool(np.sqrt(np.mean(np.square(array - mistake))) <= measure.allowance)


def _scaled(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    if not array.any():
        return "it is all zeros"
    factor = float(np.vdot(array, truth) / np.vdot(truth, truth)) if truth.any() else 1.0
    if truth.size > 1 and f"{factor:.4g}" != "1" and _explains(measure, array, factor * truth):
        return f"everything is {factor:.4g} times what it should be"
    return None


def _explain_labels(array: np.ndarray, truth: np.ndarray) -> str | None:
    lost, gained = int(((array == 0) & (truth != 0)).sum()), int(((array != 0) & (truth == 0)).sum())
    parts = [f"{lost} tokens that should have a loss have none"] * bool(lost)
    parts += [f"{gained} tokens that should have no loss have one"] * bool(gained)
    return " and ".join(parts) or None


def _explain_update(measure: Measure, array: np.ndarray, truth: np.ndarray, before: np.ndarray) -> str | None:
    if np.array_equal(array, before):
        return "the step changes nothing"
    decay = float(np.vdot(array - truth, before) / np.vdot(before, before))
    if _explains(measure, array, truth + decay * before):
        return "weight decay is applied and should not be" if decay < 0 else "weight decay is left out"
    factor = float(np.vdot(array - before, truth - before) / np.vdot(truth - before, truth - before))
    if _explains(measure, array, before + factor * (truth - before)):
        return f"the update is {factor:.4g} times what it should be"
    return None


def _explain_clipping(case: GateCase, measure: Measure, array: np.ndarray, candidate: Arrays) -> str | None:
    """The same step on gradients that are clipped otherwise."""
    name, prefix = measure.name.removeprefix("step."), "step.before."
    before = {key.removeprefix(prefix): x for key, x in candidate.items() if key.startswith(prefix)}
    matrices = {key for key, x in before.items() if x.ndim >= 2}
    limit = case.step.clip_norm
    for words, clip, counted in (
        ("gradients are not clipped", None, {name}),
        (f"gradients are clipped to 1, not to {limit}", 1.0, set(before)),
        ("gradients are clipped one by one", limit, {name}),
        ("the norm that clips is that of the matrices alone", limit, matrices | {name}),
        ("the norm that clips is that of norms and biases alone", limit, set(before) - matrices | {name}),
    ):
        gradients = {key: candidate[f"gradients.{key}"] for key in counted}
        train = case.step.model_copy(update={"clip_norm": clip})
        if _explains(
            measure, array, first_step(train, {key: before[key] for key in counted}, gradients, "float64")[name]
        ):
            return words
    return None


def _explain_losses(measure: Measure) -> str | None:
    """Losses of the steps before are right, and so are all learning rates."""
    if not measure.tap.isdecimal() or int(measure.tap) < 2:
        return None
    return "the first update is right: look at what a step leaves to the next (betas, moments, gradients)"


def _explain_norms(case: GateCase, measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """Losses of all steps are right."""
    if case.trajectory.clip_norm and _explains(measure, array, np.minimum(truth, case.trajectory.clip_norm)):
        return "they are the norms after clipping"
    return _scaled(measure, array, truth) or ("they leave out parameters" if (array < truth).all() else None)


def _explain_rates(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    if _explains(measure, array[:-1], truth[1:]):
        return "each step has the rate of the step after it"
    if _explains(measure, array[1:], truth[:-1]):
        return "each step has the rate of the step before it"
    wrong = np.flatnonzero(np.abs(array - truth) > measure.allowance)
    if not len(wrong):
        return None
    return f"of {len(array)} steps {len(wrong)} have a wrong rate, the first is step {wrong[0] + 1}"
