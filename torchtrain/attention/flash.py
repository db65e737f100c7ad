"""Engine `flash`: FlashAttention-2 varlen, from the `flash-attn` package where installed, else from torch itself.

Both take packed [tokens, heads, D] tensors with cu_seqlens and align causal masking bottom-right, which is what the
plan is built for. Upstream: flash_attn/flash_attn_interface.py (flash_attn_varlen_func), torch/nn/attention/varlen.py.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · N query tokens · M gathered keys.
"""

import importlib.util
import inspect
from typing import Any

import torch
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.attention.gather import gather_keys, gather_queries, scatter_queries
from torchtrain.attention.plan import AttentionPlan

HALF = (torch.float16, torch.bfloat16)


def flash_provider(device: torch.device) -> str:
    """Name what runs `flash` on this device: `flash-attn` or `torch.nn.attention.varlen`.

    Raises:
        UserError: no kernel for this device.
    """
    if device.type == "cuda":
        if torch.version.cuda is not None and torch.cuda.get_device_capability(device) < (8, 0):
            name = torch.cuda.get_device_name(device)
            raise UserError(f"attention flash: {name} is older than sm80 (Ampere); choose sdpa or flex")
        return "flash-attn" if importlib.util.find_spec("flash_attn") else "torch.nn.attention.varlen"
    # torch has no FlashAttention kernel off CUDA; a kernel somebody registered (the tests do, on a CPU) counts.
    if torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", device.type.upper()):
        return "torch.nn.attention.varlen"
    raise UserError(f"attention flash: needs a CUDA device, this is {device.type}; choose sdpa (or auto)")


def attend_flash(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """Attend with one varlen call. Returns out [B, T, H, D] and the detached float32 log-sum-exp [B, H, T].

    Raises:
        UserError: no kernel for the device, a dtype other than float16 and bfloat16 on CUDA, a head_dim that is over
            256 or no multiple of 8.
    """
    provider = flash_provider(q_BTHD.device)
    D = q_BTHD.shape[-1]
    if q_BTHD.is_cuda and q_BTHD.dtype not in HALF:
        raise UserError(f"attention flash: dtype {q_BTHD.dtype}; it takes bfloat16 and float16, choose sdpa or flex")
    if D % 8 or D > 256:
        raise UserError(f"attention flash: head_dim {D} is over 256 or no multiple of 8; choose sdpa or flex")
    q_NHD, k_MKD, v_MKD = gather_queries(q_BTHD, plan), gather_keys(k_BTKD, plan), gather_keys(v_BTKD, plan)
    call = _call_flash_attn if provider == "flash-attn" else _call_torch_varlen
    out_NHD, lse_HN = call(q_NHD, k_MKD, v_MKD, plan, scale)
    lse_BTH = scatter_queries(lse_HN.detach().T, plan, fill=float("-inf"))
    return scatter_queries(out_NHD, plan), lse_BTH.transpose(1, 2)


def _call_flash_attn(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn import flash_attn_varlen_func  # type: ignore[import-not-found]

    out_NHD, lse_HN, _ = flash_attn_varlen_func(
        q,
        k,
        v,
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        softmax_scale=scale,
        causal=True,
        return_attn_probs=True,  # the only way to the log-sum-exp; without dropout no probabilities are made
    )
    return out_NHD, lse_HN


def _call_torch_varlen(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    # torch 2.11 has no enable_gqa: its kernel takes fewer key/value heads without being told.
    gqa: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    out_NHD, lse_HN = varlen_attn(
        q,
        k,
        v,
        plan.cu_seqlens_q,
        plan.cu_seqlens_k,
        plan.max_seqlen_q,
        plan.max_seqlen_k,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=(-1, 0),  # causal, aligned bottom-right
        **gqa,
    )
    return out_NHD, lse_HN
