"""Stacks segments of similar length, so that many short documents need few calls of a kernel.

Each segment is padded at its end with copies of its last token. The padded length depends on the segment's own length
alone, so a segment's numbers do not depend on the others. Under a causal mask no token of the segment sees the padding,
and the padding's output is thrown away. So it needs no mask and has a gradient of zero.

Legend: M gathered keys · P the same, padded and by batches · N query tokens · S segments · R anchor tokens · C copies.
"""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torchtrain.attention.plan import AttentionPlan

# Lengths up to the first number are rounded up to a multiple of the second. torch's CPU kernel takes 256 queries
# at a time from 768 on, 64 from 192 on, and 32 below. So 768 tokens take as long as 640, and a longer segment is worth
# a call to itself.
_STEPS = ((64, 4), (192, 8), (640, 16), (768, 128))


@dataclass(frozen=True, eq=False)
class Batches:
    """The segments of a plan in another order, padded and stacked."""

    plan: "AttentionPlan"  # with its keys laid out as P, for `gather_keys`
    shapes: tuple[tuple[int, int], ...]  # segments and tokens of each batch; the products sum up to P


def padded_length(tokens: int) -> int:
    """Return a segment's padded length: at most a fifth longer, or an eighth from 64 tokens on."""
    step = next((step for most, step in _STEPS if tokens <= most), 1)
    return -(-tokens // step) * step


def make_batches(plan: "AttentionPlan") -> Batches:
    """Stack the segments of a plan by their padded lengths, the shortest first."""
    lengths_S = torch.tensor(plan.seqlens_k, dtype=torch.long)
    padded_S = torch.tensor([padded_length(tokens) for tokens in plan.seqlens_k], dtype=torch.long)
    order_S = padded_S.argsort(stable=True)
    lengths, counts = padded_S.unique(return_counts=True)
    shapes = tuple(zip(counts.tolist(), lengths.tolist(), strict=True))

    # For each slot of P the slot of M that it copies, and back.
    start_S = lengths_S.cumsum(0) - lengths_S
    spread_S = padded_S[order_S]
    first_S = spread_S.cumsum(0) - spread_S
    segment_P = order_S.repeat_interleave(spread_S)
    within_P = torch.arange(int(spread_S.sum())) - first_S.repeat_interleave(spread_S)
    slot_P = start_S[segment_P] + within_P.minimum(lengths_S[segment_P] - 1)
    own_P = within_P < lengths_S[segment_P]
    back_M = torch.empty(int(lengths_S.sum()), dtype=torch.long)
    back_M[slot_P[own_P]] = own_P.nonzero().flatten()

    device = plan.k_index_M.device
    in_order = torch.equal(slot_P, torch.arange(len(back_M)))
    slot_P, back_M = slot_P.to(device), back_M.to(device)
    laid_out = dataclasses.replace(
        plan,
        k_index_M=plan.k_index_M[slot_P],
        own_slot_N=back_M[plan.own_slot_N],
        anchor_slot_RC=_at(back_M, plan.anchor_slot_RC),
        keys_in_order=plan.keys_in_order and in_order,
    )
    return Batches(laid_out, shapes)


def _at(back_M: Tensor, slot_RC: Tensor) -> Tensor:
    return torch.where(slot_RC >= 0, back_M[slot_RC.clamp(min=0)], slot_RC)
