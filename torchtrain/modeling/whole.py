"""The shape of a parameter, whether this rank holds all of it or a part."""

import torch
from torch import Tensor


def whole_shape(parameter: Tensor) -> torch.Size:
    """Return a parameter's shape, that of all ranks' parts together where it is cut up."""
    return getattr(parameter, "ds_shape", parameter.shape)
