"""Engine `sdpa`: one `scaled_dot_product_attention` per segment. Portable, and the slow obvious twin of `flash`.

It runs the same plan as `flash`. SDPA's causal flag is aligned top-left and so wants square inputs: each document brings
the anchor's queries along with the anchor's keys, and their A rows of output are thrown away. That costs A extra queries a
document and never a mask.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · n tokens of one segment.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrain.attention.gather import gather_keys, scatter_queries
from torchtrain.attention.plan import AttentionPlan


def attend_sdpa(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float
) -> tuple[Tensor, None]:
    """Attend segment by segment. Returns out [B, T, H, D] in q's dtype, and None: SDPA gives no log-sum-exp."""
    if not plan.seqlens_q:
        return torch.zeros_like(q_BTHD) + 0 * q_BTHD, None  # nothing but padding: zeros that still carry a graph
    segments = zip(
        gather_keys(q_BTHD, plan).split(plan.seqlens_k),
        gather_keys(k_BTKD, plan).split(plan.seqlens_k),
        gather_keys(v_BTKD, plan).split(plan.seqlens_k),
        plan.seqlens_q,
        strict=True,
    )
    outs = [_attend_causal(q, k, v, scale)[-n:] for q, k, v, n in segments]
    return scatter_queries(torch.cat(outs), plan), None


def _attend_causal(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, scale: float) -> Tensor:
    q_1HnD, k_1KnD, v_1KnD = (x.transpose(0, 1)[None] for x in (q_nHD, k_nKD, v_nKD))
    out_1HnD = F.scaled_dot_product_attention(q_1HnD, k_1KnD, v_1KnD, is_causal=True, scale=scale, enable_gqa=True)
    return out_1HnD[0].transpose(0, 1)
