"""The first divergence of a case in words: where it is, how large, in which tokens, and which mistake would give it.

`parity_tests.mistakes.words` explains arrays of the forward pass; here is what only training has.
"""

from functools import partial

import numpy as np

from parity_tests.gate.case import GateCase
from parity_tests.gate.truth import OracleArrays
from parity_tests.mistakes.rotation import describe_shifts
from parity_tests.mistakes.words import Known, explain_attention, explain_rotation, explains, scaled, sentence, where
from parity_tests.oracle import Arrays, first_step
from parity_tests.report.schema import Measure


def describe(case: GateCase, measure: Measure, truth: np.ndarray, candidate: Arrays, oracle: OracleArrays) -> str:
    """One line: `layer 7, k after RoPE: 41 times the allowance; positions are off by +1 from token 512 on`.

    case: what was run.
    measure: the first that breaks the rule.
    truth: its truth.
    candidate, oracle: all arrays of both sides.
    """
    by_token = measure.group == "forward" and truth.ndim > 1
    by_token |= measure.name in ("loss.tokens", "inputs.shift_labels", "inputs.weights")
    by_token |= measure.name.startswith(("run.inputs.", "run.losses."))
    explain = partial(cause, case, measure, truth, candidate, oracle)
    return sentence(measure, where(measure), (candidate[measure.name], truth), explain, by_token)


def cause(case: GateCase, measure: Measure, truth: np.ndarray, candidate: Arrays, oracle: OracleArrays) -> str | None:
    """Return words for the first mistake that explains the measure, or None."""
    array = candidate[measure.name]
    if not (np.isfinite(array) & np.isfinite(truth)).all():
        return None
    if measure.group == "run" and measure.tap in ("q_rope", "k_rope", "attn"):
        return scaled(measure, array, truth)  # what went in is that of other rows
    if measure.tap in ("q_rope", "k_rope"):
        return explain_rotation(measure, _known(case, candidate, oracle, measure.layer))
    if measure.tap == "attn":
        return explain_attention(measure, _known(case, candidate, oracle, measure.layer)) or scaled(
            measure, array, truth
        )
    if measure.tap == "rates":
        return _explain_rates(measure, array, truth)
    if measure.tap == "position_ids":
        return describe_shifts(array - truth)
    if measure.name == "loss.tokens":
        return _explain_labels(array, truth)
    if measure.group == "trajectory":
        if measure.tap == "norms":
            return _explain_norms(case, measure, array, truth)
        return _explain_losses(case, measure, array, oracle)
    if measure.group == "step":
        before = candidate.get(f"step.before.{measure.name.removeprefix('step.')}")
        if before is None:
            return None
        clipped = None if np.array_equal(array, before) else _explain_clipping(case, measure, array, candidate)
        return clipped or _explain_update(measure, array, truth, before)
    return None if measure.allowance == 0 else scaled(measure, array, truth)


def _known(case: GateCase, candidate: Arrays, oracle: OracleArrays, layer: int | None) -> Known:
    config = case.decoder_config
    scale: float | None = config.scale or config.head_dim**-0.5
    if config.windows[layer or 0] is not None or config.softcap is not None or config.sinks:
        scale = None  # the mistakes of attention are those of the mask rule alone
    exact = (oracle.exact.get("inputs.position_ids"), oracle.exact.get("inputs.document_ids"))
    return Known(candidate, oracle.truth, *exact, config.rope, scale)


def _explain_labels(array: np.ndarray, truth: np.ndarray) -> str | None:
    lost, gained = int(((array == 0) & (truth != 0)).sum()), int(((array != 0) & (truth == 0)).sum())
    parts = [f"{lost} tokens that should have a loss have none"] * bool(lost)
    parts += [f"{gained} tokens that should have no loss have one"] * bool(gained)
    return " and ".join(parts) or None


def _explain_update(measure: Measure, array: np.ndarray, truth: np.ndarray, before: np.ndarray) -> str | None:
    if np.array_equal(array, before):
        return "the step changes nothing"
    decay = float(np.vdot(array - truth, before) / np.vdot(before, before))
    if explains(measure, array, truth + decay * before):
        return "weight decay is applied and should not be" if decay < 0 else "weight decay is left out"
    factor = float(np.vdot(array - before, truth - before) / np.vdot(truth - before, truth - before))
    if explains(measure, array, before + factor * (truth - before)):
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
        if explains(
            measure, array, first_step(train, {key: before[key] for key in counted}, gradients, "float64")[name]
        ):
            return words
    return None


def _explain_losses(case: GateCase, measure: Measure, array: np.ndarray, oracle: OracleArrays) -> str | None:
    """Losses of the steps before are right, and so are all learning rates: the oracle trains under other settings."""
    number = int(measure.tap) if measure.tap.isdecimal() else 0
    limit = case.trajectory.clip_norm
    retrain = oracle.retrain if number else None
    for words, changes in (
        ("AdamW's betas are 0.9 and 0.999", {"betas": (0.9, 0.999)}),
        ("gradients are not clipped", {"clip_norm": None}),
        (f"gradients are clipped to 1, not to {limit}", {"clip_norm": 1.0}),
        ("epsilon is 1e-8", {"epsilon": 1e-8}),
    ):
        train = case.trajectory.model_copy(update=changes)
        if retrain and explains(measure, array, retrain(train, number + 1)):
            return words
    if number < 2:
        return None
    return "the first update is right: look at what a step leaves to the next (betas, moments, gradients)"


def _explain_norms(case: GateCase, measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    """Losses of all steps are right."""
    if case.trajectory.clip_norm and explains(measure, array, np.minimum(truth, case.trajectory.clip_norm)):
        return "they are the norms after clipping"
    return scaled(measure, array, truth) or ("they leave out parameters" if (array < truth).all() else None)


def _explain_rates(measure: Measure, array: np.ndarray, truth: np.ndarray) -> str | None:
    if explains(measure, array[:-1], truth[1:]):
        return "each step has the rate of the step after it"
    if explains(measure, array[1:], truth[:-1]):
        return "each step has the rate of the step before it"
    wrong = np.flatnonzero(np.abs(array - truth) > measure.allowance)
    if not len(wrong):
        return None
    return f"of {len(array)} steps {len(wrong)} have a wrong rate, the first is step {wrong[0] + 1}"
