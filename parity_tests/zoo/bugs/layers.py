"""Bugs of what a layer adds to the mask rule: windows, the anchor beyond a window, soft caps, sinks, scales.

And bugs of layers that carry a state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity_tests.gate.case import SIZES
from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import Context, attention, every_engine, wrap
from torchtrain.attention import recurrent
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan, make_plan


def _options(change: Callable[..., dict[str, Any]]) -> Context:
    """Attend with the options that `change(key_value_heads, **options)` returns in place of a layer's own."""

    def make(attend: Callable[..., Any]) -> Callable[..., Any]:
        def changed(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, **options: Any) -> Any:
            return attend(q_BTHD, k_BTKD, v_BTKD, plan, **options | change(k_BTKD.shape[2], **options))

        return changed

    return attention(make)


window_off_by_one = Bug(
    what="window one token too long",
    where="flash-attention's window_size leaves the query out: transformers issue 39408, zml PR 763",
    stage="forward",
    apply=lambda: _options(lambda _, window, **__: {"window": window and window + 1}),
    likely={"model": "windows"},
)

windows_in_other_layers = Bug(
    what="windows in the other layers",
    where="Megatron-Bridge PR 4875: Gemma 2's layers counted from one had each other's attention",
    stage="forward",
    apply=lambda: _options(lambda _, window, **__: {"window": 6 if window is None else None}),
    likely={"model": "windows"},
)


def _by_index_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    index_T = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)
    near_TT = index_T[:, None] - index_T < (layer.window or len(index_T))

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        return plain.softmax(logits, mask & near_TT)

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, replace(layer, window=None), probabilities)


# The window counts whatever the row stores between a query and a key: only the first document sees the anchor.
window_by_row_index = Bug(
    what="window counts tokens of the row",
    where="seen in reviews: q_idx - kv_idx < window in a mask_mod of FlexAttention, on packed rows",
    stage="forward",
    apply=lambda: every_engine(_by_index_attend),
    likely={"model": "windows"},
)

anchor_beyond_window = Bug(
    what="anchor visible beyond the window",
    where="seen in reviews: the anchor is or-ed to a mask that has the window in it already",
    stage="forward",
    apply=lambda: _options(lambda _, **__: {"keep_anchor": True, "engine": "dense"}),
    likely={"model": "windows"},
)

anchor_behind_window = Bug(
    what="anchor hidden by the window",
    where="seen in reviews: the window is and-ed to a mask that has the anchor in it already",
    stage="forward",
    apply=lambda: _options(lambda _, **__: {"keep_anchor": False}),
    likely={"beyond_window": "anchor"},
)


def _cap_after_mask_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    cap = layer.softcap or 50.0

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        return ((logits.masked_fill(~mask, float("-inf")) / cap).tanh() * cap).softmax(-1)

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, replace(layer, softcap=None), probabilities)


# The mask's minus infinity is capped too: what is hidden has the logit -cap.
cap_after_mask = Bug(
    what="soft cap after the mask",
    where="the ONNX Attention operator's own definition (issue 7865); a review of flash-attention PR 1025",
    stage="forward",
    apply=lambda: every_engine(_cap_after_mask_attend),
    likely={"model": "capped"},
)

cap_missing = Bug(
    what="soft cap missing",
    where="vllm-metal issue 665, mistral.rs PR 1928: a kernel that has the argument is given none",
    stage="forward",
    apply=lambda: _options(lambda _, **__: {"softcap": None}),
    likely={"model": "capped"},
)


def _cap_without_gradient_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    cap = layer.softcap or 50.0

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        return plain.softmax(logits + ((logits / cap).tanh() * cap - logits).detach(), mask)

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, replace(layer, softcap=None), probabilities)


cap_without_gradient = Bug(
    what="soft cap left out of the backward pass",
    where="seen in reviews of kernels: the backward pass makes the scores anew and caps them, without the slope",
    stage="gradients",
    apply=lambda: every_engine(_cap_without_gradient_attend),
    likely={"model": "capped"},
)


def _sink_of_group(kv_heads: int, sinks_H: Tensor | None, **_: Any) -> dict[str, Any]:
    if sinks_H is None:
        return {}
    sinks_KG = sinks_H.view(kv_heads, -1)
    return {"sinks_H": sinks_KG[:, :1].expand_as(sinks_KG).flatten()}


sink_of_group = Bug(
    what="one sink for a group of heads",
    where="pie PR 272: sinks expanded from key/value heads, though each query head has its own",
    stage="forward",
    apply=lambda: _options(_sink_of_group),
    likely={"model": "sinks"},
)

sink_without_gradient = Bug(
    what="sinks without a gradient",
    where="flash-attention issue 1973 (flash_attn.cute); a kernel for inference used to train gpt-oss",
    stage="gradients",
    apply=lambda: _options(lambda _, sinks_H, **__: {"sinks_H": None if sinks_H is None else sinks_H.detach()}),
    likely={"model": "sinks"},
)


_HYBRIDS = "parity_tests/tests/test_hybrids.py"


def _state(change: Callable[[Tensor], Tensor]) -> Context:
    """Let layers with a state run by `change(document_ids_BT)`; attention runs by the documents as they are."""

    def make(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda forward, x, plan: run(forward, x, make_plan(change(plan.document_ids_BT.clone())))

    return wrap(recurrent.run_by_documents, make)


def _cut_in_two(ids_BT: Tensor) -> Tensor:
    later_BT = (ids_BT == 1).cumsum(1) > (ids_BT == 1).sum(1, keepdim=True) // 2
    return torch.where((ids_BT == 1) & later_BT, ids_BT.max() + 1, ids_BT)


state_leaked = Bug(
    what="state carried over a border",
    where="prime-rl issue 3000, SkyRL PR 2056: Mamba layers of packed rows that are not told the borders",
    stage="forward",
    apply=lambda: _state(lambda ids_BT: torch.where(ids_BT == 2, 1, ids_BT)),
    caught_by=_HYBRIDS,
)

state_reset_twice = Bug(
    what="state reset inside a document",
    where="seen in reviews: chunks of a row are taken for documents",
    stage="forward",
    apply=lambda: _state(_cut_in_two),
    caught_by=_HYBRIDS,
)

state_without_anchor = Bug(
    what="anchor left out of the state",
    where="seen in reviews: attention sees the anchor, and the layers beside it reset at every border",
    stage="forward",
    apply=lambda: _state(lambda ids_BT: torch.where(ids_BT == 0, ids_BT.max() + 1, ids_BT)),
    caught_by=_HYBRIDS,
)


scale_ignored = Bug(
    what="head_dim ** -0.5 for the model's own scale",
    where="seen in reviews: kernels that take no scale, under Granite (attention_multiplier) and Gemma 2",
    stage="forward",
    apply=lambda: _options(lambda _, **__: {"scale": SIZES["head_dim"] ** -0.5}),
    likely={"model": "scaled"},
)

scale_twice = Bug(
    what="the model's own scale applied twice",
    where="seen in reviews of ports of Gemma: q is multiplied by query_pre_attn_scalar ** -0.5, and the kernel scales",
    stage="forward",
    apply=lambda: _options(lambda _, scale, **__: {"scale": scale * scale}),
    likely={"model": "scaled"},
)

# A multiplier is taken for the number under the root, or the other way around.
scale_under_a_root = Bug(
    what="the model's own scale taken for the number under the root",
    where="seen in reviews of ports: query_pre_attn_scalar ** -0.5 is a scale, attention_multiplier is one as it is",
    stage="forward",
    apply=lambda: _options(lambda _, scale, **__: {"scale": scale**-0.5}),
    likely={"model": "scaled"},
)
