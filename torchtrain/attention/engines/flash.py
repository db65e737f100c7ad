"""The FlashAttention engines: one varlen call under the plan.

`flash` is FlashAttention-2, from the `flash-attn` package where it is installed, else from torch itself. `flash3` (on
Hopper) and `flash4` (on Hopper and Blackwell) are newer generations, which torch loads from their packages in place
of its own kernel. All take packed [tokens, heads, D] tensors with cu_seqlens and align causal masking bottom-right,
which is what the plan is built for.

Upstream: flash_attn/flash_attn_interface.py (flash_attn_varlen_func), torch/nn/attention/varlen.py and _registry.py
(activate_flash_attention_impl).

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · N query tokens · M gathered keys.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.attention
from torch import Tensor
from torch.autograd.function import once_differentiable

from anchorline.errors import UserError, one_line
from torchtrain.attention.engines.gather import attend_nothing, gather_keys, gather_queries, scatter_queries
from torchtrain.attention.layer import LayerOptions, sink_gradient
from torchtrain.attention.plan import AttentionPlan

HALF = (torch.float16, torch.bfloat16)
Kernel = Callable[..., tuple[Tensor, Tensor]]  # q, k, v, plan, scale, window, softcap


@dataclass(frozen=True)
class Newer:
    """A generation that torch does not have itself."""

    torch_name: str  # for activate_flash_attention_impl
    majors: tuple[int, ...]  # compute capabilities
    gpus: str
    package: str

    @property
    def capabilities(self) -> str:
        """Return the compute capabilities, for a message."""
        return " or ".join(f"{major}.x" for major in self.majors)


NEWER = {
    "flash3": Newer("FA3", (9,), "a Hopper", "flash_attn_interface (the folder hopper of flash-attention)"),
    "flash4": Newer("FA4", (9, 10), "a Hopper or Blackwell", "flash-attn-4"),
}


def find_kernel(engine: str, device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return what runs `flash`, `flash3` or `flash4` on this device in this dtype. Raises UserError: nothing can."""
    if device.type != "cuda":
        # torch has no FlashAttention kernel off CUDA; a kernel somebody registered (the tests do, on a CPU) counts.
        own = engine == "flash" and torch._C._dispatch_has_kernel_for_dispatch_key(
            "aten::_flash_attention_forward", device.type.upper()
        )
        if own:
            return call_torch_varlen
        raise UserError(f"attention {engine}: needs a CUDA device, this is {device.type}; choose sdpa (or auto)")
    if dtype not in HALF:
        raise UserError(f"attention {engine}: dtype {dtype}; it takes bfloat16 and float16, choose sdpa or flex")
    if engine in NEWER:
        _activate(engine, device)
        return call_torch_varlen
    if torch.version.hip is None and capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"attention flash: {name} is older than sm80 (Ampere); choose sdpa or flex")
    if _import_flash_attn() is not None:
        return _call_flash_attn
    if (active := _active()) is not None:
        raise UserError(
            f"attention flash: {_engine_of(active)} stands in its place in this process; choose that, one a process"
        )
    return call_torch_varlen


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return a GPU's compute capability."""
    return torch.cuda.get_device_capability(device)


@cache
def _import_flash_attn() -> Callable[..., Any] | None:
    """Import flash-attn's varlen function; None where it is not installed (flash-attn-4 alone does not have it)."""
    try:
        return importlib.import_module("flash_attn.flash_attn_interface").flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if error.name in ("flash_attn", "flash_attn.flash_attn_interface"):
            return None
        reason: Exception = error
    except Exception as error:  # a library built for another torch or CUDA fails in many ways
        reason = error
    raise UserError(
        f"attention flash: flash-attn is installed and cannot be imported: {type(reason).__name__}: "
        f"{one_line(reason)}; "
        f"install one built for torch {torch.__version__}, or remove it: torch has a kernel of its own"
    ) from None


def uses_flash_attn() -> bool:
    """Whether `flash` is the package flash-attn here, and not torch's own kernel."""
    return _import_flash_attn() is not None


def _engine_of(torch_name: str) -> str:
    return next((engine for engine, newer in NEWER.items() if newer.torch_name == torch_name), torch_name)


def _active() -> str | None:
    """Return the generation that replaces torch's own kernel, if one does."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # newer than `activate_...`
    return None if current is None else current()


def _activate(engine: str, device: torch.device) -> None:
    """Replace torch's own kernel by a newer generation, once in a process."""
    newer, active = NEWER[engine], _active()
    if capability(device)[0] not in newer.majors:
        has, name = ".".join(map(str, capability(device))), torch.cuda.get_device_name(device)
        raise UserError(
            f"attention {engine}: needs {newer.gpus} (compute capability {newer.capabilities}), {name} has {has}; "
            "choose flash"
        )
    if active == newer.torch_name:
        return
    if active is not None:
        raise UserError(f"attention {engine}: {_engine_of(active)} runs in this process; choose that, one a process")
    try:
        torch.nn.attention.activate_flash_attention_impl(newer.torch_name)
    except Exception as error:  # of the package's import, which fails in many ways
        raise UserError(
            f"attention {engine}: torch {torch.__version__} cannot load it: {type(error).__name__}: {one_line(error)}; "
            f"install {newer.package}, or choose flash"
        ) from None


def leave_newer() -> None:
    """Restore torch's own kernel if `flash3` or `flash4` replaced it, for example between two measurements."""
    if _active() is not None:  # a torch that can name it can restore it, too
        torch.nn.attention.restore_flash_attention_impl()


def attend_flash(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions, engine: str = "flash"
) -> tuple[Tensor, Tensor]:
    """Attend with one varlen call. Returns out [B, T, H, D] and the detached float32 log-sum-exp [B, H, T].

    The backward pass adds dq up in no fixed order, unless `torch.use_deterministic_algorithms(True)` is set. With sinks
    it runs torch's own kernel, whose backward pass can be called with a log-sum-exp that counts the sink. Raises
    UserError: as `find_kernel`; a head_dim that is over 256 or no multiple of 8; an anchor kept beyond the window; a
    soft cap with sinks.
    """
    if layer.keep_anchor:
        raise UserError(
            f"attention {engine}: does not keep the anchor beyond a window; choose flex, or keep_anchor=False"
        )
    kernel = find_kernel(engine, q_BTHD.device, q_BTHD.dtype)
    B, T, H, D = q_BTHD.shape
    if D % 8 or D > 256:
        raise UserError(f"attention {engine}: head_dim {D} is over 256 or no multiple of 8; choose sdpa or flex")
    if not plan.seqlens_q:  # nothing but padding: the kernels refuse to be called with no segment
        lse_BHT = torch.full((B, H, T), float("-inf"), dtype=torch.float32, device=q_BTHD.device)
        return attend_nothing(q_BTHD, k_BTKD, v_BTKD), lse_BHT
    q_NHD, k_MKD, v_MKD = gather_queries(q_BTHD, plan), gather_keys(k_BTKD, plan), gather_keys(v_BTKD, plan)
    scale, window, softcap = layer.scale, layer.window, layer.softcap
    if softcap is not None and layer.sinks_H is not None:
        raise UserError(f"attention {engine}: no soft caps and sinks in one layer; choose flex")
    if layer.sinks_H is None:
        out_NHD, lse_HN = kernel(q_NHD, k_MKD, v_MKD, plan, scale, window, softcap)
    else:
        out_NHD, lse_HN = call_torch_varlen(q_NHD, k_MKD, v_MKD, plan, scale, window, sinks_H=layer.sinks_H)
    lse_BTH = scatter_queries(lse_HN.detach().T, plan, fill=float("-inf"))
    return scatter_queries(out_NHD, plan), lse_BTH.transpose(1, 2)


def _left(window: int | None) -> int:
    """Return how many keys before its own a query sees, as the kernels take it."""
    return -1 if window is None else window - 1


def _call_flash_attn(
    q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, scale: float, window: int | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    flash_attn_varlen_func = _import_flash_attn()
    assert flash_attn_varlen_func is not None
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
        window_size=(_left(window), 0 if window else -1),
        softcap=softcap or 0.0,
        deterministic=torch.are_deterministic_algorithms_enabled(),  # which torch's own kernel asks by itself
        return_attn_probs=True,  # the only way to the log-sum-exp; without dropout no probabilities are made
    )
    return out_NHD, lse_HN


def call_torch_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int | None,
    softcap: None = None,
    sinks_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run torch's own kernel. Returns out [N, H, D] and the log-sum-exp [H, N], which has no gradient."""
    return _Varlen.apply(q, k, v, sinks_H, plan, scale, window)  # type: ignore[return-value]


class _Varlen(torch.autograd.Function):
    """torch's own kernel, whose softmax may also count one logit for each head, with no value: a sink.

    The kernel leaves the sink out. Its output times exp(lse - total) counts it, where total is the log-sum-exp with the
    sink. The kernel's backward pass computes probabilities from a log-sum-exp and an output: it is given these two.

    torch's `varlen_attn` makes a gradient of zeros for the log-sum-exp and one for a random state. Here there is none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_MKD: Tensor,
        v_MKD: Tensor,
        sinks_H: Tensor | None,
        plan: AttentionPlan,
        scale: float,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:
        from torch.nn.attention import varlen  # noqa: F401  # registers the two operations

        # What follows q, k and v, as torch's own `varlen_attn` calls it: causal, aligned bottom-right.
        lengths = (plan.cu_seqlens_q, plan.cu_seqlens_k, plan.max_seqlen_q, plan.max_seqlen_k)
        options = (*lengths, window is None, scale, [_left(window), 0])
        out_NHD, lse_HN, unused = torch.ops.torch_attn._varlen_attn(q_NHD, k_MKD, v_MKD, *options, **_gqa())
        if sinks_H is not None:
            total_HN = torch.logaddexp(lse_HN, sinks_H.to(lse_HN.dtype)[:, None])
            out_NHD = (out_NHD * (lse_HN - total_HN).exp().T[..., None]).to(q_NHD.dtype)
            lse_HN = total_HN
        ctx.save_for_backward(q_NHD, k_MKD, v_MKD, sinks_H, out_NHD, lse_HN, unused)
        ctx.options = options
        ctx.mark_non_differentiable(lse_HN)
        ctx.set_materialize_grads(False)
        return out_NHD, lse_HN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHD: Tensor | None, _: None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad_NHD is None:
            return (None,) * 7
        q_NHD, k_MKD, v_MKD, sinks_H, out_NHD, lse_HN, unused = ctx.saved_tensors
        *lengths, causal, scale, window = ctx.options
        gradients = torch.ops.torch_attn._varlen_attn_backward(
            grad_NHD, q_NHD, k_MKD, v_MKD, out_NHD, lse_HN, *lengths, causal, unused, scale, window
        )
        of_sinks = None if sinks_H is None else sink_gradient(grad_NHD, out_NHD, lse_HN.T, sinks_H)
        return *gradients, of_sinks, None, None, None


@cache
def _gqa() -> dict[str, Any]:
    """torch 2.11 has no enable_gqa: its kernel takes fewer key/value heads without the argument."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
