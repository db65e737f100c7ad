"""Engine `sdpa`: one `scaled_dot_product_attention` for each batch of segments of similar length. It is portable.

SDPA's causal flag is aligned top-left and so needs square inputs: each document brings the anchor's queries as well as
its keys, and their rows of output are thrown away. So neither these nor padding (`torchtrain.attention.batches`) need a
mask. On a CPU `half_on_cpu` replaces SDPA; in float64 it does so for sinks and windows only.

On CUDA, where no other kernel fits, torch silently falls back to one that holds all pairs of a document. This engine
forbids that, repeats key/value heads where a kernel does not take fewer, and refuses what still does not fit.

Upstream: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · N query tokens · P gathered keys,
padded · G segments of a batch · n tokens of each.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.attention.engines.flash import HALF, capability
from torchtrain.attention.engines.gather import attend_nothing, gather_keys, scatter_queries
from torchtrain.attention.engines.half_on_cpu import attend_on_cpu
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan


def attend_sdpa(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    """Attend batch by batch. Returns out [B, T, H, D] in q's dtype, and None: SDPA gives no log-sum-exp. Raises
    UserError: on CUDA torch has no kernel for this dtype and head_dim but the one that holds all pairs; an anchor kept
    beyond the window; sinks or a window on CUDA.
    """
    if layer.keep_anchor:
        raise UserError("attention sdpa: does not keep the anchor beyond a window; choose flex or dense")
    if q_BTHD.is_cuda and (layer.sinks_H is not None or layer.window is not None):
        raise UserError("attention sdpa: no attention sinks and no windows on CUDA; choose flash or flex")
    if not plan.seqlens_q:
        return attend_nothing(q_BTHD, k_BTKD, v_BTKD), None
    stacked, shapes = plan.batches
    if q_BTHD.is_cuda and not _takes_fewer_heads(q_BTHD):
        copies = q_BTHD.shape[2] // k_BTKD.shape[2]
        k_BTKD, v_BTKD = (x.repeat_interleave(copies, dim=2) for x in (k_BTKD, v_BTKD))
    sizes = [segments * tokens for segments, tokens in shapes]
    q_P, k_P, v_P = (gather_keys(x, stacked).split(sizes) for x in (q_BTHD, k_BTKD, v_BTKD))
    with _without_all_pairs(q_BTHD):
        outs = [_attend_causal(q, k, v, shape, layer) for q, k, v, shape in zip(q_P, k_P, v_P, shapes, strict=True)]
    out_PHD = torch.cat(outs) if len(outs) > 1 else outs[0]
    if not stacked.keys_in_order:
        out_PHD = out_PHD.index_select(0, stacked.own_slot_N)
    return scatter_queries(out_PHD, plan), None


def _attend_causal(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], layer: LayerOptions) -> Tensor:
    """Attend within each of the segments that follow one another in q [G n, H, D], k, v [G n, K, D]."""
    q_GHnD, k_GKnD, v_GKnD = (x.unflatten(0, shape).transpose(1, 2) for x in (q, k, v))
    if q.device.type == "cpu":  # head by head in memory, which its kernel reads fastest
        q_GHnD, k_GKnD, v_GKnD = q_GHnD.contiguous(), k_GKnD.contiguous(), v_GKnD.contiguous()
    added = layer.sinks_H is not None or layer.window is not None
    if added or (q.device.type == "cpu" and q.dtype != torch.float64):
        out_GHnD = attend_on_cpu(q_GHnD, k_GKnD, v_GKnD, layer.scale, layer.sinks_H, layer.window)
    else:
        out_GHnD = F.scaled_dot_product_attention(
            q_GHnD, k_GKnD, v_GKnD, is_causal=True, scale=layer.scale, enable_gqa=True
        )
    return out_GHnD.transpose(1, 2).flatten(0, 1)


def _takes_fewer_heads(q: Tensor) -> bool:
    """Whether SDPA's FlashAttention runs here: only that kernel takes fewer key/value heads than query heads."""
    return q.dtype in HALF and q.shape[-1] <= 256 and capability(q.device) >= (8, 0)


@contextmanager
def _without_all_pairs(q_BTHD: Tensor) -> Iterator[None]:
    """Forbid SDPA's plain kernel on CUDA while the block lasts. On a CPU nothing here leads to it."""
    if not q_BTHD.is_cuda:
        yield
        return
    allowed = torch.backends.cuda.math_sdp_enabled()
    torch.backends.cuda.enable_math_sdp(False)
    try:
        yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise UserError(
            f"attention sdpa: on {torch.cuda.get_device_name(q_BTHD.device)} torch has no kernel for {q_BTHD.dtype} "
            f"and head_dim {q_BTHD.shape[3]} but one that holds all pairs of a document; choose flash or flex"
        ) from None
    finally:
        torch.backends.cuda.enable_math_sdp(allowed)
