"""Whether two computations are one, by the rule of `parity_tests/tolerance.py`, which the trainer cannot import:

    error(candidate, truth) <= 2 x error(reference, truth) + one rounding of the truth's own size

with root mean squares, truth in float64, and a reference that rounds as the candidate may. `test_bench.py`
holds the two together.
"""

import torch
from torch import Tensor


def error_ratio(candidate: Tensor, truth: Tensor, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the candidate's error over what is allowed: up to 1 passes. Infinite where something is not finite."""
    wide = truth.double()
    error, allowed = (_size(x.double() - wide) for x in (candidate, reference))
    allowed = 2 * allowed + torch.finfo(dtype).eps / 2 * _size(wide)
    if not error < float("inf") or not allowed < float("inf"):
        return float("inf")
    if error == 0:
        return 0.0
    return error / allowed if allowed > 0 else float("inf")


def _size(x: Tensor) -> float:
    return x.square().mean().sqrt().item()
