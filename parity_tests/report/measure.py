"""One array, judged: the rule, where it errs most, and how its error runs along the sequence.

`parity run` and `parity compare` measure with this.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from anchorline.tolerance import Verdict, judge
from parity_tests.report.names import group_of, layer_and_tap
from parity_tests.report.schema import Measure, PartMeasure, Profile

RUNS, SHORTEST_RUN = 16, 8  # of tokens, in a profile


def measure(
    name: str,
    candidate: np.ndarray,
    truth: np.ndarray,
    reference: np.ndarray | None,
    dtype: str,
    likely_error: float = 0.0,
    rotated: int = 0,
) -> Measure:
    """Judge an array by the one rule; without a reference exactly: its error is then the number of other entries."""
    group = group_of(name)
    layer, tap = layer_and_tap(name)
    rest = {"name": name, "group": group, "layer": layer, "tap": tap, "shape": list(truth.shape)}
    if reference is None:
        differs = candidate != truth
        worst = [int(i) for i in np.unravel_index(int(differs.argmax()), truth.shape)]
        return Measure(**rest, error=float(differs.sum()), allowance=0.0, worst=worst)
    verdict = judge(
        candidate,
        truth,
        reference,
        dtype,
        axes_of(name, truth.ndim),
        inherits=True,
        rotated=rotated,
        likely_error=likely_error,
    )
    profile = profile_of(candidate, truth, reference, dtype) if group == "forward" else None
    return Measure(**rest, **judged(verdict), profile=profile)


def judged(verdict: Verdict) -> dict[str, Any]:
    """What a verdict says, as fields of a measure."""
    part = None if verdict.part is None else PartMeasure(**vars(verdict.part))
    return {"error": verdict.error, "allowance": verdict.allowance, "worst": list(verdict.worst), "part": part}


def axes_of(name: str, dimensions: int) -> str | None:
    """The axes of an array along which its parts are judged, too."""
    if name == "loss.tokens":
        return "BT"
    return {"forward": {3: "BTM", 4: "BTHD"}, "gradients": {2: "OI"}}.get(group_of(name), {}).get(dimensions)


def profile_of(candidate: Any, truth: Any, reference: Any, dtype: str) -> Profile:
    """The rule within runs of tokens of [B, T, ...]."""
    tokens = truth.shape[1]
    runs = max(1, min(RUNS, tokens // SHORTEST_RUN))
    starts = [tokens * run // runs for run in range(runs)]
    verdicts = [
        judge(candidate[:, start:stop], truth[:, start:stop], reference[:, start:stop], dtype)
        for start, stop in zip(starts, [*starts[1:], tokens], strict=True)
    ]
    return Profile(
        starts=starts,
        error=[_shorten(verdict.error) for verdict in verdicts],
        allowance=[_shorten(verdict.allowance) for verdict in verdicts],
    )


def _shorten(value: float) -> float:
    return float(f"{value:.4g}")  # a profile is drawn, not judged


def where_not_finite(candidate: np.ndarray, truth: np.ndarray) -> str | None:
    """`NaN at [0, 3], 12 of 4096 elements`, of what the truth has finite; or None."""
    wrong = ~np.isfinite(candidate) & np.isfinite(truth)
    if not wrong.any():
        return None
    first = np.unravel_index(int(wrong.argmax()), wrong.shape)
    what = "NaN" if np.isnan(candidate[first]) else "infinite"
    return f"{what} at {[int(i) for i in first]}, {int(wrong.sum())} of {wrong.size} elements"


def join_problems(problems: Sequence[str]) -> str | None:
    """What kept arrays from being judged, in a line; None where nothing did."""
    more = f"; and {len(problems) - 3} more such" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more if problems else None
