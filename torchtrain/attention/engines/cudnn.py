"""Engine `cudnn`: cuDNN's attention on packed documents, by the package nvidia-cudnn-frontend. It never ran on a card.

The package's operation takes [tokens, heads, D] with cu_seqlens, aligned bottom-right, and builds a graph (up to half a
second) for each number of segments, longest segment and number of tokens. So all of these are rounded up: segments by
empty ones, tokens by some that no segment holds. A run checks the engine against `dense` first (`engines.measure`).

Upstream: NVIDIA/cudnn-frontend 1.32, python/cudnn/sdpa/fwd/torch_op.py.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · N query tokens ·
P with tokens of no segment.
"""

import importlib
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorline.errors import UserError, one_line
from torchtrain.attention.engines.flash import HALF, capability
from torchtrain.attention.engines.gather import attend_nothing, gather_keys, gather_queries, scatter_queries
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan

OPERATION = "cudnn::sdpa_fwd"
_LEAST = 64  # tokens


def check_cudnn(device: torch.device, dtype: torch.dtype) -> None:
    """Check that the engine can run. Raises UserError: another device or dtype, or the package is missing or broken."""
    if torch._C._dispatch_has_kernel(OPERATION) and torch._C._dispatch_has_kernel_for_dispatch_key(
        OPERATION, device.type.upper()
    ):
        return
    if device.type != "cuda":
        raise UserError(f"attention cudnn: needs a CUDA device, this is {device.type}; choose sdpa (or auto)")
    if dtype not in HALF:
        raise UserError(f"attention cudnn: dtype {dtype}; it takes bfloat16 and float16, choose sdpa or flex")
    if capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"attention cudnn: {name} is older than sm80 (Ampere); choose sdpa or flex")
    if reason := _register():
        raise UserError(
            f"attention cudnn: {reason}; pip install 'nvidia-cudnn-frontend[cutedsl]>=1.32', or choose flash"
        )


@cache
def _register() -> str:
    """Import the package, which registers the operation; return why it cannot be."""
    try:
        importlib.import_module("cudnn.sdpa.fwd.torch_op")
    except Exception as error:  # a library built for another CUDA fails in many ways
        return f"nvidia-cudnn-frontend cannot be imported: {type(error).__name__}: {one_line(error)}"
    return ""


def attend_cudnn(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, Tensor]:
    """Attend with one call. Returns out [B, T, H, D] and the detached float32 log-sum-exp [B, H, T].

    Raises UserError: as `check_cudnn`; sinks, a soft cap or a window.
    """
    if layer.sinks_H is not None or layer.softcap is not None or layer.window is not None:
        raise UserError("attention cudnn: no attention sinks, soft caps or windows; choose flash or flex")
    check_cudnn(q_BTHD.device, q_BTHD.dtype)
    B, T, H, _ = q_BTHD.shape
    if not plan.seqlens_q:
        lse_BHT = torch.full((B, H, T), float("-inf"), dtype=torch.float32, device=q_BTHD.device)
        return attend_nothing(q_BTHD, k_BTKD, v_BTKD), lse_BHT
    q_NHD, k_MKD, v_MKD = gather_queries(q_BTHD, plan), gather_keys(k_BTKD, plan), gather_keys(v_BTKD, plan)
    lengths = [_with_empty(cu) for cu in (plan.cu_seqlens_q, plan.cu_seqlens_k)]
    longest = [round_up(most, 1) for most in (plan.max_seqlen_q, plan.max_seqlen_k)]
    out_PHD, lse_PH1 = torch.ops.cudnn.sdpa_fwd(
        *(_with_unseen(x) for x in (q_NHD, k_MKD, v_MKD)),
        layer.scale,
        is_causal=True,
        causal_bottom_right=True,
        cu_seqlens_q=lengths[0],
        cu_seqlens_kv=lengths[1],
        max_seqlen_q=longest[0],
        max_seqlen_kv=longest[1],
        return_lse=True,
    )
    N = len(q_NHD)
    lse_BTH = scatter_queries(lse_PH1.detach()[:N, :, 0], plan, fill=float("-inf"))
    return scatter_queries(out_PHD[:N], plan), lse_BTH.transpose(1, 2)


def round_up(tokens: int, steps: int) -> int:
    """Round up to a multiple of 1/steps of the power of two below, so that few numbers come out."""
    unit = max(_LEAST, (1 << (tokens.bit_length() - 1)) // steps)
    return -(-tokens // unit) * unit


def _with_unseen(x: Tensor) -> Tensor:
    """Append tokens that no segment holds; their gradient is dropped."""
    more = round_up(len(x), 8) - len(x)
    return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x.contiguous()


def _with_empty(cu_seqlens: Tensor) -> Tensor:
    """Append empty segments up to a power of two."""
    segments = len(cu_seqlens) - 1
    more = (1 << (segments - 1).bit_length()) - segments
    return torch.cat([cu_seqlens, cu_seqlens[-1:].expand(more)]) if more else cu_seqlens
