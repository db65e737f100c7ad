"""Queries are turned forwards and keys backwards, so that scores depend on the sum of the positions."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import rotation


def _oppose(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    from transformers.models.llama.modeling_llama import rotate_half

    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos - rotate_half(k) * sin


BUG = Bug(
    what="keys rotated backwards",
    where="seen in reviews of fused rotation kernels, where the backward pass (angle negated) was reused for k",
    stage="forward",
    apply=lambda: rotation(_oppose),
)
