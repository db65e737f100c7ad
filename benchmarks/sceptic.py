"""Recompute the contrasts of docs/training-experiment.md with numpy and scipy alone, and nothing of Anchorline.

cd benchmarks/results && python ../sceptic.py training-experiment.json training-experiment-{control,cost}.json
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

main, control, cost = (json.loads(Path(name).read_text()) for name in sys.argv[1:4])
RUNS, SEEDS, STEPS = main["measured"] | control["measured"], range(8), np.arange(16, 33, 4)
AT_1_BIT = [seed for seed in SEEDS if f"bits1_after-intra_reset-{seed}" in RUNS]


def answers(cell: str, step: float | None = None, seeds=SEEDS) -> np.ndarray:
    """Log-probability of the answers of each seed: the mean over the checkpoints, or at a step between two of them."""
    runs = [-np.mean(RUNS[f"{cell}-{seed}"]["nats"], axis=1) for seed in seeds]
    return np.array([run.mean() if step is None else np.interp(step, STEPS, run) for run in runs])


def gain(form: str, mask: str, over: str = "intra", seeds=SEEDS) -> np.ndarray:
    """What a mask gains over another in an arithmetic, seed by seed."""
    return answers(f"{form}-{mask}", seeds=seeds) - answers(f"{form}-{over}", seeds=seeds)


def show(name: str, each: np.ndarray) -> None:
    """Print mean and Student's 95% interval of a number for each seed."""
    half = stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / np.sqrt(len(each))
    print(f"{name}: {each.mean():+.4f} ({each.mean() - half:+.4f} to {each.mean() + half:+.4f}, {len(each)} seeds)")


show("broken relativity", gain("bf16_after", "intra_reset") - gain("bf16_before", "intra_reset"))
show("anchor in exact arithmetic", gain("exact", "anchor"))
show("anchor in bfloat16, more than in exact", gain("bf16_after", "anchor") - gain("exact", "anchor"))
show("positive control", answers("bits1_after-intra") - answers("exact-intra"))
at_1_bit = [gain(f"bits1_{when}", "intra_reset", seeds=AT_1_BIT) for when in ("after", "before")]
show("broken relativity at 1 bit", at_1_bit[0] - at_1_bit[1])
show("anchor against full, equal tokens", gain("exact", "anchor", "full"))
seconds = {row["loop"]: row["seconds"]["median"] for row in cost[0]["rows"]}  # at 1,024 tokens
ratio = seconds["torchtrain, full"] / seconds["torchtrain, anchor"]
show(f"anchor against full, equal time ({ratio:.3f})", answers("exact-anchor", 32) - answers("exact-full", 32 / ratio))
show("full at step 16", answers("exact-full", 16))
show("full at step 32", answers("exact-full", 32))
