"""The shapes and numbers of weights, whole or cut up among ranks."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's whole shape, also where it is cut up among ranks."""
    return getattr(parameter, "ds_shape", parameter.shape)


def count_weights(parameters: Iterable[Tensor]) -> int:
    """Return how many weights parameters hold, also where they are cut up among ranks."""
    return sum(whole_shape(parameter).numel() for parameter in parameters)


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, or None; each is read once, none copied."""
    for name, x in tensors:
        if x.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(x)))):
            return name
    return None
