"""The plug-in for transformers: attention implementation `anchor`, and one name per engine (`implementation_name`).

    torchtrain.register()
    model.set_attn_implementation("anchor")
    model(input_ids, position_ids=position_ids, document_ids=document_ids, use_cache=False)

Extra keyword arguments of `model(...)` travel to every layer's attention function, through gradient checkpointing too:
`document_ids` [B, T], and optionally `plan`, built once per batch by `make_plan`. Without a plan it is built from the
document ids in the first layer and remembered with that tensor for the others.

Upstream: transformers/modeling_utils.py (AttentionInterface), transformers/masking_utils.py (AttentionMaskInterface).

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from anchorline.errors import UserError
from torchtrain.attention.engines import ENGINES, attend, resolve_engine
from torchtrain.attention.plan import AttentionPlan, make_plan

logger = logging.getLogger(__name__)
_announced: set[tuple[str, str, torch.dtype]] = set()


def implementation_name(engine: str) -> str:
    """Name of an engine among transformers' attention implementations: `auto` is `anchor`, `sdpa` is `anchor_sdpa`.

    `flash` is `anchor_varlen`: transformers takes every name with "flash" in it for a kernel of its own to look up.
    """
    return {"auto": "anchor", "flash": "anchor_varlen"}.get(engine, f"anchor_{engine}")


def register() -> None:
    """Register `anchor` (engine chosen by `auto`), `anchor_varlen`, `anchor_flex`, `anchor_sdpa` and `anchor_dense`.

    Registration is global to the process and may be repeated. It changes no model: choose with
    `model.set_attn_implementation("anchor")` or `from_pretrained(..., attn_implementation="anchor")`.
    """
    for engine in ("auto", *ENGINES):
        name = implementation_name(engine)
        AttentionInterface.register(name, partial(_anchor_attention, engine=engine))
        AttentionMaskInterface.register(name, _refuse_masks)


def _anchor_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    engine: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    document_ids: Tensor | None = None,
    plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' calling convention: q [B, H, T, D] in, out [B, T, H, D] and no attention weights back."""
    _refuse(query, key, attention_mask, dropout, kwargs)
    if plan is None:
        if document_ids is None:
            raise UserError(
                "document_ids: missing; call model(input_ids, position_ids=..., document_ids=...) with an integer [batch, "
                "tokens] tensor: 0 anchor, 1.. documents, -1 padding"
            )
        plan = _remembered_plan(document_ids, query)
    if engine == "auto":
        _announce(resolve_engine(engine, query.device, query.dtype), query)
    q_BTHD, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (query, key, value))
    out_BTHD, _ = attend(q_BTHD, k_BTKD, v_BTKD, plan, engine=engine, scale=scaling)
    return out_BTHD, None


def _refuse(query: Tensor, key: Tensor, attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
    """Refuse every argument that would change the result and that no engine honours."""
    T = query.shape[2]
    if attention_mask is not None:
        raise UserError("attention_mask: not honoured by `anchor`; give padding the document id -1 instead")
    if key.shape[2] != T:
        raise UserError(
            f"past_key_values: {T} queries against {key.shape[2]} keys; `anchor` has no KV cache: pass use_cache=False, and "
            'generate with model.set_attn_implementation("sdpa")'
        )
    if dropout:
        raise UserError(f"attention_dropout: {dropout} is not honoured by `anchor`; set config.attention_dropout=0")
    window = kwargs.get("sliding_window")
    if window is not None and window < T:  # a window as long as the row hides nothing
        raise UserError(
            f"sliding_window: {window} would hide keys of a row of {T} tokens, which `anchor` does not honour; set "
            "config.sliding_window=None or shorten the row"
        )
    for name in ("softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            raise UserError(f"{name}: not honoured by `anchor`; remove it (documents are told by document_ids)")
    if kwargs.get("output_attentions"):
        raise UserError("output_attentions: `anchor` makes no attention weights; use the eager implementation for them")


def _refuse_masks(
    *_: Any, attention_mask: Tensor | None = None, q_offset: Any = 0, use_vmap: bool = False, **__: Any
) -> None:
    """Stand in for transformers' mask builder: no mask is built, and none that was asked for is dropped in silence."""
    if attention_mask is not None:
        raise UserError("attention_mask: not honoured by `anchor`; give padding the document id -1 instead")
    if int(q_offset):
        raise UserError(
            "past_key_values: `anchor` has no KV cache; pass use_cache=False, and generate with "
            'model.set_attn_implementation("sdpa")'
        )
    if use_vmap:
        raise UserError(
            "or_mask_function, and_mask_function: not honoured by `anchor`; express the mask in document_ids"
        )


def _remembered_plan(document_ids: Tensor, query: Tensor) -> AttentionPlan:
    """Build the plan in the first layer and keep it on the tensor, so that it lives and dies with it.

    `_version` counts in-place changes: ids that were written to get a new plan. Inference tensors count none: there the ids
    themselves are compared.
    """
    if not isinstance(document_ids, Tensor):
        raise UserError(f"document_ids: a {type(document_ids).__name__}; give an integer tensor [batch, tokens]")
    version = None if document_ids.is_inference() else document_ids._version
    remembered: tuple[int | None, AttentionPlan] | None = getattr(document_ids, "_anchor_plan", None)
    if remembered is not None and remembered[0] == version:
        plan = remembered[1]
        unchanged = version is not None or torch.equal(plan.document_ids_BT.to(document_ids), document_ids)
        if unchanged and plan.document_ids_BT.device == query.device:
            return plan
    plan = make_plan(document_ids).to(query.device)
    document_ids._anchor_plan = (version, plan)  # type: ignore[attr-defined]
    return plan


def _announce(chosen: str, query: Tensor) -> None:
    what = (chosen, query.device.type, query.dtype)
    if what not in _announced:
        _announced.add(what)
        logger.warning("attention auto: %s on %s in %s", *what)  # a warning, so that it is seen without logging set up
