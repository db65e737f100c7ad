"""Draw the error along the sequence against the allowance, and say in words where it exceeds the allowance."""

import io
import math
from base64 import b64encode
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from parity_tests.report.schema import Profile

# Grey is read on white and on black paper alike.
_STYLE: Any = {"font.size": 8, "text.color": "grey", "axes.edgecolor": "grey"}
_STYLE |= dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), "grey")


def plot(profile: Profile, tokens: int) -> str:
    """Return a drawing as the address of an image: two step lines over tokens, on a logarithmic scale.

    Args:
        profile: at least one run.
        tokens: of a row; the last run ends there.
    """
    edges = [*profile.starts, max(tokens, profile.starts[-1] + 1)]
    with rc_context(_STYLE):
        figure = Figure(figsize=(4.2, 2.0), layout="constrained")
        axes = figure.subplots()
        for values, label, style in ((profile.error, "error", "-"), (profile.allowance, "allowance", "--")):
            shown = [value if math.isfinite(value) and value > 0 else math.nan for value in values]
            axes.stairs(shown, edges, baseline=None, label=label, linestyle=style)
        for i in _over(profile):
            axes.axvspan(edges[i], edges[i + 1], color="red", alpha=0.15, linewidth=0)
        axes.set(yscale="log", xlim=(edges[0], edges[-1]), xlabel="token")
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0, 1.25), ncols=2)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100, transparent=True)
    return f"data:image/png;base64,{b64encode(drawn.getvalue()).decode()}"


def where_over(profile: Profile) -> str:
    """`above its allowance from token 512 on`: which runs, in words."""
    over, runs = _over(profile), len(profile.starts)
    if not over:
        return "within its allowance in every run"
    if len(over) == runs:
        return "above its allowance everywhere"
    first = profile.starts[over[0]]
    if over == list(range(over[0], runs)):
        return f"above its allowance from token {first:,} on"
    return f"above its allowance in {len(over)} of {runs} runs, the first from token {first:,}"


def _over(profile: Profile) -> list[int]:
    """The runs that break the rule by themselves."""
    pairs = zip(profile.error, profile.allowance, strict=True)
    return [i for i, (error, allowance) in enumerate(pairs) if not error <= allowance < math.inf]
