"""Engine `flex`: compiled FlexAttention under the plan's block mask (`torchtrain.attention.block_mask`).

Legend: B batch · T tokens of a row · U T, padded to whole blocks · H query heads · K key/value heads · D head_dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from anchorline.errors import UserError
from torchtrain.attention.block_mask import BLOCK
from torchtrain.attention.engines.gather import blank_padding
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan
from torchtrain.marks import PADDING


def attend_flex(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, Tensor | None]:
    """Attend with compiled FlexAttention.

    Returns out [B, T, H, D], and on CUDA the detached float32 log-sum-exp [B, H, T] (None on a CPU). Raises UserError:
    gradients or sinks on a device other than CUDA, where FlexAttention has no backward pass and gives no log-sum-exp.
    """
    sinks_H = layer.sinks_H
    if sinks_H is not None and not q_BTHD.is_cuda:
        raise UserError(f"attention flex: no attention sinks on {q_BTHD.device.type}; choose sdpa")
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BTHD, k_BTKD, v_BTKD))
    if needs_grad and not q_BTHD.is_cuda:
        raise UserError(f"attention flex: no backward pass on {q_BTHD.device.type}; choose sdpa, or torch.no_grad()")
    T = q_BTHD.shape[1]
    given = (blank_padding(x, plan) for x in (q_BTHD, k_BTKD, v_BTKD))
    padded = [F.pad(x, (0, 0, 0, 0, 0, -T % BLOCK)).transpose(1, 2) for x in given]
    block_mask = plan.block_mask(layer.window, layer.keep_anchor)
    options: dict[str, Any] = {"block_mask": block_mask, "scale": layer.scale, "enable_gqa": True}
    if layer.softcap is not None:
        options["score_mod"] = _cap(layer.softcap)
    if not q_BTHD.is_cuda:  # the compiled CPU kernel gives no log-sum-exp
        out_BHUD = _compiled_flex_attention()(*padded, **options)
        return blank_padding(out_BHUD[:, :, :T].transpose(1, 2), plan), None
    out_BHUD, aux = _compiled_flex_attention()(*padded, **options, return_aux=AuxRequest(lse=True))
    lse_BHU = aux.lse
    if sinks_H is not None:  # FlexAttention differentiates its log-sum-exp
        out_BHUD = (out_BHUD * torch.sigmoid(lse_BHU - sinks_H.float()[:, None])[..., None]).to(q_BTHD.dtype)
        lse_BHU = torch.logaddexp(lse_BHU, sinks_H.float()[:, None])
    # FlexAttention's kernels choose the log-sum-exp of a query that sees nothing; the rule says -inf.
    lse_BHT = lse_BHU[:, :, :T].detach().masked_fill((plan.document_ids_BT == PADDING)[:, None], float("-inf"))
    return blank_padding(out_BHUD[:, :, :T].transpose(1, 2), plan), lse_BHT


@functools.cache
def _cap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, q, k: softcap * torch.tanh(score / softcap)


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)
