"""Rounds queries and keys to few mantissa bits, in a model that otherwise computes in float32; gradients, too.

After RoPE the rounding depends on a token's position, as in bfloat16; before it, scores stay relative.
"""

from typing import Any

import torch
from torch import Tensor, nn

ROUNDED_BITS = "rounded_mantissa_bits"  # attribute of attention layers whose queries and keys are rounded after RoPE


def round_mantissa(x: Tensor, bits: int) -> Tensor:
    """Round float32 to the nearest number of `bits` stored mantissa bits, ties to even; bfloat16 stores 7.

    The exponent stays float32's. The gradient ignores this rounding, and is then rounded in the same way.

    x: float32, of any shape.
    bits: from 1 to 22.
    """
    assert x.dtype == torch.float32, x.dtype
    return _Round.apply(x, bits)  # pyright: ignore[reportReturnType]


def round_after_rope(module: nn.Module, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Round the rotated queries and keys of an attention layer that is marked with `ROUNDED_BITS`."""
    bits = getattr(module, ROUNDED_BITS, None)
    return (query, key) if bits is None else (round_mantissa(query, bits), round_mantissa(key, bits))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bits: int) -> Tensor:
        ctx.bits = bits
        return _nearest(x, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _nearest(gradients[0], ctx.bits), None


def _nearest(x: Tensor, bits: int) -> Tensor:
    dropped = 23 - bits
    as_int = x.contiguous().view(torch.int32)
    odd = (as_int >> dropped) & 1
    rounded = (as_int + ((1 << (dropped - 1)) - 1 + odd)) & -(1 << dropped)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)
