"""The error rule of `anchorline/tolerance.py`, for tensors."""

import numpy as np
import torch
from torch import Tensor

from anchorline.tolerance import judge


def error_ratio(candidate: Tensor, truth: Tensor, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the candidate's error over what the rule allows: up to 1 passes. Infinite where something is not finite.

    Args:
        candidate: the result under test, any shape, on any device.
        truth: the same quantity, computed in a wider dtype.
        reference: the same quantity with the roundings that the candidate may make.
        dtype: the dtype that the candidate computes in.
    """
    verdict = judge(*(_array(x) for x in (candidate, truth, reference)), dtype=str(dtype).removeprefix("torch."))
    return verdict.ratio if verdict.allowance < float("inf") else float("inf")


def _array(x: Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()  # numpy has no bfloat16
