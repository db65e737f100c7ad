"""The first divergence, in words: where, by how much, for which tokens, and what would explain it.

Legend: B batch · T tokens of a row.
"""

import numpy as np

from parity_tests.gate.causes import cause
from parity_tests.gate.spec import CaseSpec
from parity_tests.gate.truth import Arrays, OracleArrays
from parity_tests.report.schema import Measure

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


def describe(spec: CaseSpec, measure: Measure, truth: np.ndarray, candidate: Arrays, oracle: OracleArrays) -> str:
    """One line: `layer 7, k after RoPE: 41 times the allowance; positions are off by +1 from token 512 on`.

    Args:
        spec: the case.
        measure: the first that breaks the rule.
        truth: its truth.
        candidate, oracle: all arrays of both sides.
    """
    explained = cause(spec, measure, truth, candidate, oracle)
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
