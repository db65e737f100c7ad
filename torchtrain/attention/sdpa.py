"""Engine `sdpa`: one `scaled_dot_product_attention` per segment. Portable, and the slow obvious twin of `flash`.

It runs the same plan as `flash`. SDPA's causal flag is aligned top-left and so wants square inputs: each document
brings the anchor's queries along with the anchor's keys, and their A rows of output are thrown away. That costs A extra
queries a document and never a mask.

In half precision on a CPU it computes in float32 and rounds the output and each gradient once: torch's CPU kernel sums
dk and dv over blocks of queries in bfloat16, which errs more than FlashAttention's roundings explain (docs/LOG.md).

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
    dtype = q_BTHD.dtype
    if q_BTHD.device.type == "cpu":
        q_BTHD, k_BTKD, v_BTKD = (x.to(torch.promote_types(dtype, torch.float32)) for x in (q_BTHD, k_BTKD, v_BTKD))
    q_n, k_n, v_n = (gather_keys(x, plan).split(plan.seqlens_k) for x in (q_BTHD, k_BTKD, v_BTKD))
    outs = [
        _attend_causal(q_nHD, k_nKD, v_nKD, scale)[-n:]
        for q_nHD, k_nKD, v_nKD, n in zip(q_n, k_n, v_n, plan.seqlens_q, strict=True)
    ]
    return scatter_queries(torch.cat(outs).to(dtype), plan), None


def _attend_causal(q_nHD: Tensor, k_nKD: Tensor, v_nKD: Tensor, scale: float) -> Tensor:
    q_1HnD, k_1KnD, v_1KnD = (x.transpose(0, 1)[None] for x in (q_nHD, k_nKD, v_nKD))
    out_1HnD = F.scaled_dot_product_attention(q_1HnD, k_1KnD, v_1KnD, is_causal=True, scale=scale, enable_gqa=True)
    return out_1HnD[0].transpose(0, 1)
