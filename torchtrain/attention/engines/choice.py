"""The engines by name, and the choice `auto` makes.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.attention.engines.cudnn import attend_cudnn, check_cudnn
from torchtrain.attention.engines.dense import attend_dense
from torchtrain.attention.engines.flash import HALF, NEWER, attend_flash, capability, find_kernel, uses_flash_attn
from torchtrain.attention.engines.flex import attend_flex
from torchtrain.attention.engines.sdpa import attend_sdpa
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan, make_plan

Engine = Callable[[Tensor, Tensor, Tensor, AttentionPlan, LayerOptions], tuple[Tensor, Tensor | None]]

ENGINES: dict[str, Engine] = {
    "flash": attend_flash,
    **{engine: partial(attend_flash, engine=engine) for engine in NEWER},
    "cudnn": attend_cudnn,
    "flex": attend_flex,
    "sdpa": attend_sdpa,
    "dense": attend_dense,
}


def resolve_engine(
    name: str, device: torch.device | str, dtype: torch.dtype, *, training: bool = True, capped: bool = False
) -> str:
    """Return the engine that will run: `auto` becomes `flash` on CUDA in half precision, `sdpa` anywhere else.

    Where a model caps its logits (`capped`), `auto` becomes `flex` on CUDA and `dense` anywhere else. Raises UserError:
    the name is unknown, or that engine cannot run here or does not cap. Nothing is chosen in its place.
    """
    device = torch.device(device)
    if name == "auto":
        capable = device.type == "cuda" and capability(device) >= (8, 0)
        name = "flash" if capable and dtype in HALF else "sdpa"
        if capped:
            name = "flex" if device.type == "cuda" else "dense"
    if name not in ENGINES:
        raise UserError(f"attention {name!r}: unknown engine; choose auto, {', '.join(ENGINES)}")
    if name == "flash" or name in NEWER:
        find_kernel(name, device, dtype)
    if name == "cudnn":
        check_cudnn(device, dtype)
    if capped and (name in ("sdpa", "cudnn") or name in NEWER or (name == "flash" and not uses_flash_attn())):
        raise UserError(
            f"attention {name}: does not cap logits; choose flex (CUDA) or dense; flash does where the package "
            "flash-attn is installed"
        )
    if name == "flex" and training and device.type != "cuda":
        raise UserError(f"attention flex: no backward pass on {device.type}; choose sdpa (or auto)")
    return name


def attend(
    q_BTHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    documents: AttentionPlan | Tensor,
    *,
    engine: str = "auto",
    scale: float | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
    window: int | None = None,
    keep_anchor: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend under the mask rule.

    q_BTHD: queries, rotated, float [B, T, H, D].
    k_BTKD: keys, rotated, [B, T, K, D]; H is a multiple of K, query head h reads key/value head h // (H / K).
    v_BTKD: values [B, T, K, D], or narrower than D.
    documents: a plan from `make_plan`, or document_ids [B, T] (then the plan is built in this very call).
    engine: `auto`, or one of `ENGINES`.
    scale: factor on the logits; default D ** -0.5.
    sinks_H: attention sinks (gpt-oss): for each query head one more logit of the softmax, with no value.
    softcap: each scaled logit x becomes softcap * tanh(x / softcap) (Gemma 2).
    window, keep_anchor: the layer's window, and whether the anchor stays visible beyond it
        (`torchtrain.attention.rule`).
    Returns out [B, T, H, D] (as narrow as v) in q's dtype, 0 at padding; and the detached log-sum-exp [B, H, T], with
        the sink where there is one, -inf at padding, or None from an engine that has none (`sdpa`, and `flex` on a
        CPU). What padding holds reaches nothing, NaN and infinity neither.
    Raises UserError: shapes, dtypes or devices that do not fit each other, bad document ids, an engine that cannot run
        or does not compute what the layer has.
    """
    plan = documents if isinstance(documents, AttentionPlan) else make_plan(documents)
    width = v_BTKD.shape[-1]
    v_BTKD = pad_values(v_BTKD, k_BTKD)
    _check_shapes(q_BTHD, k_BTKD, v_BTKD, plan)
    if sinks_H is not None and sinks_H.shape != q_BTHD.shape[2:3]:
        raise UserError(f"sinks: shape {list(sinks_H.shape)} for {q_BTHD.shape[2]} query heads; give one for each")
    name = resolve_engine(engine, q_BTHD.device, q_BTHD.dtype, training=False, capped=softcap is not None)
    factor: float = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
    layer = LayerOptions(factor, sinks_H, softcap, window, keep_anchor and window is not None)
    out_BTHD, lse_BHT = ENGINES[name](q_BTHD, k_BTKD, v_BTKD, plan, layer)
    return out_BTHD[..., :width], lse_BHT


def pad_values(values: Tensor, keys: Tensor) -> Tensor:
    """Make values [.., D] as wide as keys by zeros, where they are narrower (multi-head latent attention)."""
    narrower = keys.shape[-1] - values.shape[-1]
    return F.pad(values, (0, narrower)) if narrower > 0 else values


def _check_shapes(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan) -> None:
    shapes = f"q {list(q_BTHD.shape)}, k {list(k_BTKD.shape)}, v {list(v_BTKD.shape)}"
    if not (q_BTHD.ndim == k_BTKD.ndim == v_BTKD.ndim == 4 and k_BTKD.shape == v_BTKD.shape):
        raise UserError(f"attention: expected q [B, T, H, D] and k, v [B, T, K, D]; got {shapes}")
    B, T, H, D = q_BTHD.shape
    if k_BTKD.shape[:2] != (B, T) or k_BTKD.shape[3] != D or H % k_BTKD.shape[2]:
        raise UserError(f"attention: q, k, v must share B, T and D, and H be a multiple of K; got {shapes}")
    if plan.document_ids_BT.shape != (B, T):
        raise UserError(f"document_ids: shape {list(plan.document_ids_BT.shape)} does not fit {shapes}")
    if not q_BTHD.dtype == k_BTKD.dtype == v_BTKD.dtype:
        raise UserError(f"attention: dtypes differ: q {q_BTHD.dtype}, k {k_BTKD.dtype}, v {v_BTKD.dtype}")
    if plan.document_ids_BT.device != q_BTHD.device:
        raise UserError(f"plan: on {plan.document_ids_BT.device}, q on {q_BTHD.device}; use plan.to(device)")
