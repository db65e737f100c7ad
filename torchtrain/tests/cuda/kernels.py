"""Attention kernels for the stand-in: slow and obvious, each with the checks and the choices of the real one.

- torch's own FlashAttention (`aten::_flash_attention_forward`, which `varlen_attn` calls) and `flash-attn`, as the
  package's Python function has it: what csrc/flash_attn/flash_api.cpp of 2.8.3 refuses is refused.
- The kernels of `scaled_dot_product_attention`, and torch's choice between them
  (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp of 2.13).

FlashAttention's backward pass adds dq up in whatever order blocks end. Here its last place is drawn unless it
is asked to be deterministic, so that what relies on its bits is found out.

Legend: N query tokens · M key tokens · H query heads · K key/value heads · D head_dim.
"""

import math
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from torchtrain.tests import flash_on_cpu as slow

HALF = (torch.float16, torch.bfloat16)


def _on_host(function: Callable[..., tuple[Tensor, ...]], *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    device = next(x.device for x in args if isinstance(x, Tensor))
    host = [torch.ops.standin.host(x.detach()) if isinstance(x, Tensor) else x for x in args]
    return tuple(_to(device, x) if isinstance(x, Tensor) else x for x in function(*host, **kwargs))


def _to(device: torch.device, x: Tensor) -> Tensor:
    """Return a kernel's result where kernels leave it: no copy that the program makes."""
    made = torch.empty_like(x, device=device)
    if made.numel():
        torch.ops.standin.host(made).copy_(x)
    return made


def _check_flash(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> None:
    tensors = (q, k, v, cu_q, cu_k)
    assert all(x.is_cuda and x.device == q.device for x in tensors), [x.device for x in tensors]
    assert q.dtype in HALF, f"FlashAttention only supports fp16 and bf16 data type, not {q.dtype}"
    assert k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype"
    assert cu_q.dtype == cu_k.dtype == torch.int32, "cu_seqlens must have dtype int32"
    assert cu_q.is_contiguous(), "cu_seqlens_q must be contiguous"
    assert cu_k.is_contiguous(), "cu_seqlens_k must be contiguous"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Input tensor must have contiguous last dimension"
    assert cu_q.numel() > 1, "batch size must be positive"
    assert cu_q.shape == cu_k.shape
    assert q.shape[2] <= 256, "FlashAttention forward only supports head dimension at most 256"
    assert q.shape[2] % 8 == 0, "head_size should be a multiple of 8"
    assert q.shape[1] % k.shape[1] == 0, "Number of heads in key/value must divide number of heads in query"
    assert k.shape == v.shape
    assert type(max_q) is type(max_k) is int


def _in_any_order(dq: Tensor) -> Tensor:
    """Return what another order of the same sum may give, another each time: the last place moves here and there."""
    noise = torch.empty_like(dq, dtype=torch.float64).uniform_(-1, 1, generator=_ORDERS)
    return (dq.double() * (1 + torch.finfo(dq.dtype).eps * noise)).to(dq.dtype)


_ORDERS = torch.Generator()
_ORDERS.seed()


def _flash_backward(*args: Any, deterministic: bool, scale: float | None) -> tuple[Tensor, ...]:
    dq, dk, dv = _on_host(slow._backward, *args, None, None, scale=scale)
    return (dq if deterministic else _on_host(lambda x: (_in_any_order(x),), dq)[0]), dk, dv


# --- torch's own ------------------------------------------------------------------------------------------------------


def _aten_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale=None, **windows):
    _check_flash(q, k, v, cu_q, cu_k, max_q, max_k)
    return _on_host(slow._forward, q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, scale=scale, **windows)


def _aten_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, rng, unused, *, scale=None, **windows
):
    _check_flash(q, k, v, cu_q, cu_k, max_q, max_k)
    # As attention_backward.cu has it: a mere warning changes nothing.
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    args = (grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal)
    return _flash_backward(*args, deterministic=strict, scale=scale)


# --- flash-attn -------------------------------------------------------------------------------------------------------


class _FlashAttnVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_q, cu_k, max_q, max_k, scale, causal, deterministic):
        _check_flash(q, k, v, cu_q, cu_k, max_q, max_k)
        out, lse, *_ = _on_host(slow._forward, q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse, cu_q, cu_k)
        ctx.rest, ctx.scale, ctx.deterministic = (max_q, max_k, 0.0, causal), scale, deterministic
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        args = (grad.contiguous(), *ctx.saved_tensors, *ctx.rest)
        return *_flash_backward(*args, deterministic=ctx.deterministic, scale=ctx.scale), *[None] * 7


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    alibi_slopes=None,
    deterministic=False,
    return_attn_probs=False,
    block_table=None,
):
    """As flash_attn/flash_attn_interface.py of 2.8.3 has it, but for options that the trainer has no use for."""
    assert dropout_p == softcap == 0.0
    assert window_size == (-1, -1)
    assert alibi_slopes is block_table is None
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    out, lse = _FlashAttnVarlen.apply(q, k, v, *lengths, softmax_scale, causal, deterministic)
    return (out, lse, None) if return_attn_probs else out


# --- FlashAttention 3 and 4, as torch's adapters call them (torch/nn/attention/_fa3.py, _fa4.py)
# ------------------------


def _fa3_fwd(q, k, v, k_new, v_new, qv, out, cu_q, cu_k, cu_new, used_q, used_k, max_q, max_k, *rest):
    assert k_new is v_new is qv is out is cu_new is used_q is used_k is None
    scale, causal = rest[9:11]
    out, lse = _newer_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale)
    return out, lse, None, None


def _fa3_bwd(do, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, used_q, used_k, max_q, max_k, scale, causal, *rest):
    args = (do, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal)
    for into, gradient in zip((dq, dk, dv), _flash_backward(*args, deterministic=rest[3], scale=scale), strict=True):
        into.copy_(gradient)


def _fa4_fwd(
    q, k, v, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, return_lse, **rest
):
    assert return_lse
    assert rest.pop("num_splits") == 1
    assert rest.pop("window_size_right") == 0
    assert all(x is None for x in rest.values()), rest
    return _newer_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)


def _fa4_bwd(q, k, v, out, do, lse, *, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k, deterministic, **rest):
    longest = (int(torch.ops.standin.host(cu).diff().max()) for cu in (cu_seqlens_q, cu_seqlens_k))
    args = (do, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, *longest, 0.0, causal)
    return _flash_backward(*args, deterministic=deterministic, scale=softmax_scale)


def _newer_forward(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale) -> tuple[Tensor, Tensor]:
    _check_flash(q, k, v, cu_q, cu_k, max_q, max_k)
    return _on_host(slow._forward, q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale)[:2]


def flash_attn_3() -> dict[str, types.ModuleType]:
    """FlashAttention-3's package, by name; its operators are torch's from then on."""
    torch.ops.flash_attn_3 = types.SimpleNamespace(fwd=_fa3_fwd, bwd=_fa3_bwd)
    return {"flash_attn_interface": types.ModuleType("flash_attn_interface")}


def flash_attn_4() -> dict[str, types.ModuleType]:
    """FlashAttention-4's package, by name, in which `__` stands for a dot."""
    names = ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    package, cute, interface = (types.ModuleType(name) for name in names)
    package.__path__ = cute.__path__ = []  # type: ignore[attr-defined]
    interface._flash_attn_fwd, interface._flash_attn_bwd = _fa4_fwd, _fa4_bwd  # type: ignore[attr-defined]
    return dict(zip((name.replace(".", "__") for name in names), (package, cute, interface), strict=True))


# --- scaled_dot_product_attention -------------------------------------------------------------------------------------


def _choose(q, k, v, mask=None, dropout=0.0, causal=False, *, scale=None, enable_gqa=False) -> int:
    """Return torch's choice for a GPU of sm80 and newer."""
    fits = mask is None and dropout == 0 and q.shape[-1] == v.shape[-1] and k.requires_grad == v.requires_grad
    flash = fits and q.dtype in HALF and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    efficient = fits and q.dtype in (*HALF, torch.float32) and q.shape[1] == k.shape[1]
    efficient = efficient and q.shape[-1] % (8 if q.dtype in HALF else 4) == 0
    if flash and torch.backends.cuda.flash_sdp_enabled():
        return SDPBackend.FLASH_ATTENTION.value
    if efficient and torch.backends.cuda.mem_efficient_sdp_enabled():
        return SDPBackend.EFFICIENT_ATTENTION.value
    if torch.backends.cuda.math_sdp_enabled():
        return SDPBackend.MATH.value
    raise RuntimeError("No available kernel. Aborting execution.")


def _heads_first(x_BKnD: Tensor, heads: int) -> Tensor:
    return x_BKnD.double().repeat_interleave(heads // x_BKnD.shape[1], dim=1)


def _logits(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    logits = (q.double() @ _heads_first(k, q.shape[1]).mT) * scale
    hidden = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)  # aligned top-left
    return logits.masked_fill(hidden, -math.inf) if causal else logits


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    logits = _logits(q, k, causal, scale)
    return (logits.softmax(-1) @ _heads_first(v, q.shape[1])).to(q.dtype), logits.logsumexp(-1).float()


def _sdpa_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, ...]:
    B, H, K = q.shape[0], q.shape[1], k.shape[1]
    probs, do = _logits(q, k, causal, scale).softmax(-1), grad.double()
    dprobs = do @ _heads_first(v, H).mT
    dlogits = probs * (dprobs - (probs * dprobs).sum(-1, keepdim=True)) * scale
    per_head = (dlogits.mT @ q.double(), probs.mT @ do)
    dk, dv = (x.view(B, K, H // K, *x.shape[2:]).sum(2) for x in per_head)
    return tuple(x.to(q.dtype) for x in (dlogits @ _heads_first(k, H), dk, dv))


def _check_dense(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> None:
    assert all(x.is_cuda and x.device == q.device and x.dtype == q.dtype for x in (q, k, v))
    assert dropout == 0


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _flash_sdpa(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    _check_dense(q, k, v, dropout)
    assert q.dtype in HALF
    out, lse = _on_host(_sdpa, q, k, v, causal, _scale(q, scale))
    none = q.new_empty(0)
    return out, lse, none, none, q.shape[2], k.shape[2], none, none, none


def _flash_sdpa_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout, causal, seed, offset, *, scale=None
):
    dq, dk, dv = _on_host(_sdpa_backward, grad, q, k, v, causal, _scale(q, scale))
    return (
        (dq if torch.are_deterministic_algorithms_enabled() else _on_host(lambda x: (_in_any_order(x),), dq)[0]),
        dk,
        dv,
    )


def _efficient_sdpa(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    _check_dense(q, k, v, dropout)
    assert bias is None
    assert q.shape[1] == k.shape[1] == v.shape[1], "the memory-efficient kernel takes no grouped key/value heads"
    out, lse = _on_host(_sdpa, q, k, v, causal, _scale(q, scale))
    none = torch.empty((), dtype=torch.int64)
    return out, lse, none, none


def _efficient_sdpa_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, mask, causal=False, *, scale=None):
    return *_on_host(_sdpa_backward, grad, q, k, v, causal, _scale(q, scale)), None


def _mm_into(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    assert a.dtype == b.dtype, "as cuBLAS has it"
    assert a.dtype in HALF, f"out_dtype is for products of half precision, not of {a.dtype}"
    assert out_dtype == torch.float32, out_dtype
    return _on_host(lambda a, b: (a.float() @ b.float(),), a, b)[0]


def _add_product_into(total, a, b, out_dtype, *, beta=1, alpha=1, out):
    """The product rounded before it is added, as on the host, whose bits a step has."""
    assert beta == alpha == 1
    assert out_dtype == total.dtype == torch.float32
    assert a.dtype == b.dtype
    assert a.dtype in HALF
    assert out is total
    return out.add_(_on_host(lambda a, b: (a @ b,), a, b)[0])


def _norm_of_each(tensors, ord=2, dtype=None):
    """Each norm as those of its rows, so that a step has the bits of the host, which sums them by rows."""
    assert ord == 2
    return [_on_host(lambda x: (torch.linalg.vector_norm(x, dim=-1),), x)[0] for x in tensors]


def install() -> torch.library.Library:
    """Register all that torch has for CUDA; they stay for as long as the library that is returned."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in {
        "_flash_attention_forward": _aten_forward,
        "_flash_attention_backward": _aten_backward,
        "_fused_sdp_choice": _choose,
        "_scaled_dot_product_flash_attention": _flash_sdpa,
        "_scaled_dot_product_flash_attention_backward": _flash_sdpa_backward,
        "_scaled_dot_product_efficient_attention": _efficient_sdpa,
        "_scaled_dot_product_efficient_attention_backward": _efficient_sdpa_backward,
        "mm.dtype": _mm_into,
        "addmm.dtype_out": _add_product_into,
        "_foreach_norm.Scalar": _norm_of_each,
    }.items():
        library.impl(name, kernel, "CUDA")
    return library
