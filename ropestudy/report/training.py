"""The numbers of the training experiment in docs/precision.md, from its kept measurements.

`benchmarks.experiment` makes that experiment's own page.
"""

import math
from pathlib import Path

import numpy as np

from anchorline.files import read_json
from ropestudy.report.effects import difference_of, format_number

POWER = 1.96 + 0.84  # standard errors that an effect must have to be seen with 80% power


def training_numbers(file: Path) -> dict[str, str]:
    """Return the text of every key `train.*`.

    Args:
        file: measurements, as benchmarks/results/training-experiment.json holds them.
    """
    measured = read_json(file)["measured"]
    seeds = range(sum(name.startswith("exact-intra-") for name in measured))

    def answers(cell: str) -> np.ndarray:
        """Return the log-probability of the answers of each seed, the mean over checkpoints and distances."""
        return np.array([-np.mean(measured[f"{cell}-{seed}"]["nats"]) for seed in seeds])

    intra, anchor = answers("exact-intra"), answers("exact-anchor")
    reset = [answers(f"{form}-intra_reset") - answers(f"{form}-intra") for form in ("bf16_after", "bf16_before")]
    in_bf16 = answers("bf16_after-anchor") - answers("bf16_after-intra")
    spread, gain = float(intra.std(ddof=1)), float((anchor - intra).mean())
    return {
        "train.seeds": str(len(seeds)),
        "train.spread": format_number(spread, 2),
        "train.anchor": difference_of(anchor.tolist(), intra.tolist()).written(),
        "train.relativity": difference_of(reset[0].tolist(), reset[1].tolist()).written(),
        "train.precision": difference_of(in_bf16.tolist(), (anchor - intra).tolist()).written(),
        "train.unpaired": str(math.ceil(2 * (POWER * spread / gain) ** 2)),
    }
