"""Stacks segments of similar length, so that many short documents need few calls of a kernel.

Each segment is padded at its end with copies of its last token, to a length that depends on its own alone. Under a
causal mask no token sees the padding, whose output is thrown away: it needs no mask and has a gradient of zero.

Legend: M gathered keys · P the same, padded and by batches · S segments.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Lengths up to the first number are rounded up to a multiple of the second. torch's CPU kernel takes 256 queries
# at a time from 768 on, 64 from 192 on, and 32 below. So 768 tokens take as long as 640, and a longer segment is worth
# a call to itself.
_STEPS = ((64, 4), (192, 8), (640, 16), (768, 128))


class Batches(NamedTuple):
    """Segments in another order, padded and stacked."""

    shapes: tuple[tuple[int, int], ...]  # segments and tokens of each batch; the products sum up to P
    slot_P: Tensor  # for each slot of P the slot of M that it copies
    back_M: Tensor  # for each slot of M its slot of P


def padded_length(tokens: int) -> int:
    """Return a segment's padded length: at most a fifth longer, or an eighth from 64 tokens on."""
    step = next((step for most, step in _STEPS if tokens <= most), 1)
    return -(-tokens // step) * step


def make_batches(seqlens: Sequence[int]) -> Batches:
    """Stack segments of these lengths [S] by their padded lengths, the shortest first."""
    lengths_S = torch.tensor(seqlens, dtype=torch.long)
    padded_S = torch.tensor([padded_length(tokens) for tokens in seqlens], dtype=torch.long)
    order_S = padded_S.argsort(stable=True)
    lengths, counts = padded_S.unique(return_counts=True)
    start_S = lengths_S.cumsum(0) - lengths_S
    spread_S = padded_S[order_S]
    first_S = spread_S.cumsum(0) - spread_S
    segment_P = order_S.repeat_interleave(spread_S)
    within_P = torch.arange(int(spread_S.sum())) - first_S.repeat_interleave(spread_S)
    slot_P = start_S[segment_P] + within_P.minimum(lengths_S[segment_P] - 1)
    own_P = within_P < lengths_S[segment_P]
    back_M = torch.empty(int(lengths_S.sum()), dtype=torch.long)
    back_M[slot_P[own_P]] = own_P.nonzero().flatten()
    return Batches(tuple(zip(counts.tolist(), lengths.tolist(), strict=True)), slot_P, back_M)
