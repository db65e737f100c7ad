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
MASKED = -1e4  # from here on a number in a mask means "not seen"
AT_ONCE = 2**16  # values of an array that may lie on the disk


def measure(
    name: str,
    candidate: np.ndarray,
    truth: np.ndarray,
    reference: np.ndarray | None,
    dtype: str,
    likely_error: float = 0.0,
    rotated: int = 0,
) -> Measure:
    """Judge an array by the one rule; without a reference exactly."""
    if reference is None:
        return judge_exactly(name, candidate, truth)
    verdict = judge(
        *(candidate, truth, reference, dtype, axes_of(name, truth.ndim)),
        inherits=True,
        rotated=rotated,
        likely_error=likely_error,
    )
    profile = profile_of(candidate, truth, reference, dtype) if group_of(name) == "forward" else None
    return from_verdict(name, truth, verdict, profile)


def judge_exactly(name: str, candidate: np.ndarray, truth: np.ndarray, is_mask: bool = False) -> Measure:
    """The error is the number of other entries; of a mask (0 or one number) every large negative number is the same."""
    first, count = 0, 0
    mine, true = candidate.reshape(-1), truth.reshape(-1)
    for start in range(0, true.size, AT_ONCE):
        block = slice(start, start + AT_ONCE)
        differs = mine[block] != true[block]
        if is_mask:
            differs &= ~((mine[block] <= MASKED) & (true[block] <= MASKED))
        if count == 0 and differs.any():
            first = start + int(differs.argmax())
        count += int(differs.sum())
    worst = np.unravel_index(first, truth.shape) if true.size else ()
    return from_verdict(name, truth, Verdict(float(count), 0.0, tuple(int(i) for i in worst)))


def from_verdict(name: str, truth: np.ndarray, verdict: Verdict, profile: Profile | None = None) -> Measure:
    """What a verdict says, as a measure."""
    layer, tap = layer_and_tap(name)
    return Measure(
        name=name,
        group=group_of(name),
        layer=layer,
        tap=tap,
        shape=list(truth.shape),
        error=verdict.error,
        allowance=verdict.allowance,
        worst=list(verdict.worst),
        part=None if verdict.part is None else PartMeasure(**vars(verdict.part)),
        profile=profile,
    )


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
