"""Numbers that are not finite."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, or None.

    Reads each once, and copies nothing.
    """
    for name, x in tensors:
        if x.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(x)))):
            return name
    return None
