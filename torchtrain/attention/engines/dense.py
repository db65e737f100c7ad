"""Engine `dense`: the rule as a boolean [T, T] mask.

For tests and tiny inputs. It casts where transformers' eager attention casts.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · G query heads per key/value head · D head_dim.
"""

import torch
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.attention.engines.gather import blank_padding
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan
from torchtrain.attention.rule import visible_BTT

MAX_TOKENS = 8192  # a [1, H, T, T] float32 of 32 heads is 8 GiB there


def check_tokens(tokens: int) -> None:
    """Refuse rows whose mask would not fit in memory. Raises UserError: more than 8,192 tokens."""
    if tokens > MAX_TOKENS:
        raise UserError(
            f"attention dense: {tokens} tokens a row need a T x T mask; it stops at {MAX_TOKENS}, choose sdpa (or flex)"
        )


def attend_dense(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, Tensor]:
    """Attend with a materialised mask.

    Returns out [B, T, H, D] in q's dtype and the detached log-sum-exp [B, H, T] (float32, or float64 for float64
    input). Raises UserError: more than 8,192 tokens a row.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    check_tokens(T)
    q_BTHD, k_BTKD, v_BTKD = (blank_padding(x, plan) for x in (q_BTHD, k_BTKD, v_BTKD))
    q_BKGTD = q_BTHD.view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4)
    k_BK1TD = k_BTKD.permute(0, 2, 1, 3)[:, :, None]
    v_BK1TD = v_BTKD.permute(0, 2, 1, 3)[:, :, None]
    mask = visible_BTT(plan.document_ids_BT, layer.window, layer.keep_anchor)[:, None, None]

    # The logits are rounded after the product, after the scale and after each step of a cap, the softmax runs in
    # float32: eager's own casts.
    wide = torch.promote_types(q_BTHD.dtype, torch.float32)
    logits = (q_BKGTD @ k_BK1TD.mT) * layer.scale
    if layer.softcap is not None:
        logits = (logits / layer.softcap).tanh() * layer.softcap
    logits = logits.to(wide).masked_fill(~mask, float("-inf"))
    # A query that sees nothing would give NaN, in its gradient too: its softmax is over zeros, then set to 0.
    blind = ~mask.any(-1, keepdim=True)
    if layer.sinks_H is not None:
        sink_BKGT1 = layer.sinks_H.to(wide).view(K, H // K, 1, 1).expand(B, -1, -1, T, 1)
        logits = torch.cat([logits, sink_BKGT1.masked_fill(blind, float("-inf"))], dim=-1)
    probs = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)[..., :T]
    out_BKGTD = probs.to(q_BTHD.dtype) @ v_BK1TD
    lse_BHT = logits.detach().logsumexp(-1).flatten(1, 2)
    return blank_padding(out_BKGTD.permute(0, 3, 1, 2, 4).reshape(B, T, H, D), plan), lse_BHT
