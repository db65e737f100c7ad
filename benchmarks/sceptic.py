"""The primary contrasts of docs/training-experiment.md, recomputed with nothing of Anchorline's: numpy and scipy alone.

python benchmarks/sceptic.py benchmarks/results/training-experiment.json
"""

import json
import sys
from pathlib import Path

import numpy as np
from scipy import stats

MEASURED = json.loads(Path(sys.argv[1]).read_text())["measured"]


def answers(cell: str, seed: int) -> float:
    """Log-probability of the answers, mean over the last checkpoints and all distances; nan: not run."""
    found = MEASURED.get(f"{cell}-{seed}")
    return -float(np.mean(found["nats"])) if found else np.nan


def contrast(*signed_cells: str) -> str:
    """Take cells with their signs, as +exact-anchor, within each seed; return mean and Student's 95% interval."""
    seeds = range(1 + max((int(name.rsplit("-", 1)[1]) for name in MEASURED), default=-1))
    each = np.array([sum((1 if c[0] == "+" else -1) * answers(c[1:], seed) for c in signed_cells) for seed in seeds])
    each = each[~np.isnan(each)] if len(each) else each
    if len(each) < 2:
        return "not yet run"
    half = stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / np.sqrt(len(each))
    return f"{each.mean():+.4f} ({each.mean() - half:+.4f} to {each.mean() + half:+.4f}, {len(each)} seeds)"


RESET = "+bf16_after-intra_reset", "-bf16_after-intra", "-bf16_before-intra_reset", "+bf16_before-intra"
print("broken relativity:", contrast(*RESET))
print("anchor in exact arithmetic:", contrast("+exact-anchor", "-exact-intra"))
print("positive control:", contrast("+bits1_after-intra", "-exact-intra"))
