"""Bugs of what a layer adds to the mask rule: windows, the anchor beyond a window, soft caps, sinks, scales.

And bugs of layers that carry a state.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity_tests.gate.case import SIZES
from parity_tests.zoo import Bug, bug, plain
from parity_tests.zoo.patch import Context, around, attention, every_engine
from torchtrain.attention import recurrent
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan, make_plan


def _options(change: Callable[..., dict[str, Any]]) -> Context:
    """Attend with the options that `change(key_value_heads, **options)` returns in place of a layer's own."""

    def changed(attend: Any, q_BTHD: Tensor, k_BTKD: Tensor, *rest: Any, **options: Any) -> Any:
        return attend(q_BTHD, k_BTKD, *rest, **options | change(k_BTKD.shape[2], **options))

    return attention(changed)


window_off_by_one = Bug(lambda: _options(lambda _, window, **__: {"window": window and window + 1}))
windows_in_other_layers = Bug(lambda: _options(lambda _, window, **__: {"window": 6 if window is None else None}))


@bug(every_engine)
def window_by_row_index(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    index_T = torch.arange(q_BTHD.shape[1], device=q_BTHD.device)
    near_TT = index_T[:, None] - index_T < (layer.window or len(index_T))

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        return plain.softmax(logits, mask & near_TT)

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, replace(layer, window=None), probabilities)


anchor_beyond_window = Bug(lambda: _options(lambda _, **__: {"keep_anchor": True, "engine": "dense"}))
anchor_behind_window = Bug(lambda: _options(lambda _, **__: {"keep_anchor": False}))


def _capped(wrong: Callable[[Tensor, Tensor, float], Tensor]) -> Context:
    """Other probabilities under a soft cap: `wrong(logits, mask, cap)`."""

    def attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: Any, layer: Any) -> tuple[Tensor, None]:
        cap, bare = layer.softcap or 50.0, replace(layer, softcap=None)
        return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, bare, lambda logits, mask: wrong(logits, mask, cap))

    return every_engine(attend)


@bug(_capped)
def cap_after_mask(logits: Tensor, mask: Tensor, cap: float) -> Tensor:
    return ((logits.masked_fill(~mask, float("-inf")) / cap).tanh() * cap).softmax(-1)


cap_missing = Bug(lambda: _options(lambda _, **__: {"softcap": None}))


@bug(_capped)
def cap_without_gradient(logits: Tensor, mask: Tensor, cap: float) -> Tensor:
    return plain.softmax(logits + ((logits / cap).tanh() * cap - logits).detach(), mask)


@bug(_options)
def sink_of_group(kv_heads: int, sinks_H: Tensor | None, **_: Any) -> dict[str, Any]:
    if sinks_H is None:
        return {}
    sinks_KG = sinks_H.view(kv_heads, -1)
    return {"sinks_H": sinks_KG[:, :1].expand_as(sinks_KG).flatten()}


sink_without_gradient = Bug(
    lambda: _options(lambda _, sinks_H, **__: {"sinks_H": None if sinks_H is None else sinks_H.detach()})
)


def _state(change: Callable[[Tensor], Tensor]) -> Context:
    """Let layers with a state run by `change(document_ids_BT)`; attention runs by the documents as they are."""

    return around(
        recurrent.run_by_documents,
        lambda run, forward, x, plan: run(forward, x, make_plan(change(plan.document_ids_BT.clone()))),
    )


@bug(_state)
def state_reset_twice(ids_BT: Tensor) -> Tensor:
    later_BT = (ids_BT == 1).cumsum(1) > (ids_BT == 1).sum(1, keepdim=True) // 2
    return torch.where((ids_BT == 1) & later_BT, ids_BT.max() + 1, ids_BT)


state_leaked = Bug(lambda: _state(lambda ids_BT: torch.where(ids_BT == 2, 1, ids_BT)))
state_without_anchor = Bug(lambda: _state(lambda ids_BT: torch.where(ids_BT == 0, ids_BT.max() + 1, ids_BT)))
scale_ignored = Bug(lambda: _options(lambda _, **__: {"scale": SIZES["head_dim"] ** -0.5}))
scale_twice = Bug(lambda: _options(lambda _, scale, **__: {"scale": scale * scale}))
scale_under_a_root = Bug(lambda: _options(lambda _, scale, **__: {"scale": scale**-0.5}))
