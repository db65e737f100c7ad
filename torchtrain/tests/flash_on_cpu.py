"""FlashAttention's varlen kernel for a CPU, slow and obvious, so that the real plug-in path runs without a GPU.

Registered on aten's own dispatch table, where `torch.nn.attention.varlen.varlen_attn` looks for it. It takes packed
tensors, cu_seqlens, bottom-right aligned causal masking and fewer key/value heads, as the CUDA kernel does.

Legend: N query tokens · M key tokens · H query heads · K key/value heads · D head_dim.
"""

from typing import Any

import torch
from torch import Tensor


def _segments(cu_q: Tensor, cu_k: Tensor):
    q, k = cu_q.tolist(), cu_k.tolist()
    assert cu_q.dtype == cu_k.dtype == torch.int32, "the CUDA kernel reads int32"
    return [(slice(q[i], q[i + 1]), slice(k[i], k[i + 1])) for i in range(len(q) - 1)]


def _logits(q_HnD: Tensor, k_HmD: Tensor, causal: bool, scale: float, window: dict[str, Any]) -> Tensor:
    n, m = q_HnD.shape[1], k_HmD.shape[1]
    logits = (q_HnD @ k_HmD.mT) * scale
    left, right = window.get("window_size_left", -1), window.get("window_size_right", -1)
    if causal or right == 0:  # bottom-right: the last query sees every key
        logits = logits.masked_fill(torch.ones(n, m, dtype=torch.bool).triu(m - n + 1), float("-inf"))
    if left >= 0:
        logits = logits.masked_fill(torch.ones(n, m, dtype=torch.bool).tril(m - n - left - 1), float("-inf"))
    return logits


def _heads_first(x_nKD: Tensor, heads: int) -> Tensor:
    return x_nKD.double().transpose(0, 1).repeat_interleave(heads // x_nKD.shape[1], dim=0)


def _forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, **rest):
    assert dropout == 0
    assert (max_q, max_k) == tuple(max(cu.diff().tolist(), default=0) for cu in (cu_q, cu_k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.promote_types(q.dtype, torch.float32))
    for at_q, at_k in _segments(cu_q, cu_k):
        q_HnD, k_HmD, v_HmD = (_heads_first(x, q.shape[1]) for x in (q[at_q], k[at_k], v[at_k]))
        logits = _logits(q_HnD, k_HmD, causal, scale, rest)
        out[at_q] = (logits.softmax(-1) @ v_HmD).transpose(0, 1).to(q.dtype)
        lse[:, at_q] = logits.logsumexp(-1).to(lse.dtype)
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def _backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None, **rest):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    H, K, D = q.shape[1], k.shape[1], q.shape[2]
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for at_q, at_k in _segments(cu_q, cu_k):
        q_HnD, k_HmD, v_HmD = (_heads_first(x, H) for x in (q[at_q], k[at_k], v[at_k]))
        do_HnD, out_HnD = (_heads_first(x, H) for x in (grad[at_q], out[at_q]))
        # As the CUDA kernel does: from the output and the log-sum-exp that it is given.
        p_Hnm = (_logits(q_HnD, k_HmD, causal, scale, rest) - lse[:, at_q, None]).exp()
        ds_Hnm = p_Hnm * (do_HnD @ v_HmD.mT - (out_HnD * do_HnD).sum(-1, keepdim=True)) * scale
        dq[at_q] = (ds_Hnm @ k_HmD).transpose(0, 1).to(q.dtype)
        for total, per_head in ((dk, ds_Hnm.mT @ q_HnD), (dv, p_Hnm.mT @ do_HnD)):
            total[at_k] = per_head.view(K, H // K, -1, D).sum(1).transpose(0, 1).to(k.dtype)
    return dq, dk, dv


class FlashOnCPU:
    """Context manager: while it is open, torch has a FlashAttention kernel on the CPU."""

    def __enter__(self) -> "FlashOnCPU":
        self._library = torch.library.Library("aten", "IMPL")
        self._library.impl("_flash_attention_forward", _forward, "CPU")
        self._library.impl("_flash_attention_backward", _backward, "CPU")
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()
