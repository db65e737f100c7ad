"""Runs layers that carry a state (Mamba, gated delta nets, short convolutions) one document at a time.

Each document starts from the state at the end of the anchor, or without one from the initial state: a layer's own
forward runs on the anchor's tokens followed by the document's, whose outputs alone are kept. The definition is ours; it
is like attention's. Documents of similar length are stacked (`torchtrain.attention.batches`). `separate_model` runs a
whole model so, for families whose attention no engine computes.

`document_ids` and the plan reach a layer as keyword arguments, in a recomputation, too. The decoder layers of some
families do not pass them on (`_HANDS_NOTHING_ON`); hooks do it for them.

Legend: B batch · T tokens of a row · M model width · S documents of similar length L · P gathered tokens, padded.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anchorline.errors import UserError
from torchtrain.attention.callers import say_no_cache
from torchtrain.attention.engines.gather import gather_keys, scatter_queries
from torchtrain.attention.hf import APART, remembered_plan
from torchtrain.attention.masks import NOT_HONOURED, SEPARATED, hides_nothing
from torchtrain.attention.plan import AttentionPlan

# Classes of transformers whose forward takes hidden states [B, T, M], and in which a token changes only later ones.
MIXERS = frozenset(
    {
        *("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "JambaMambaMixer"),
        *("ZambaMambaMixer", "Zamba2MambaMixer", "OlmoHybridGatedDeltaNet", "Qwen3NextGatedDeltaNet"),
        *("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "KimiLinearDeltaAttention"),
        *("BailingHybridDeltaAttention", "Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"),
    }
)
# Decoder layers that get `document_ids`, and the child to which they do not pass them.
_HANDS_NOTHING_ON = {
    "JambaMambaDecoderLayer": "mamba",
    "Lfm2DecoderLayer": "conv",  # of transformers 5.17; its layers of attention have no such child
    "Lfm2MoeDecoderLayer": "conv",
    "NemotronDecoderLayer": "self_attn",
    "StableLmDecoderLayer": "self_attn",
}
_HELD = "_anchor_documents"
_NOT_HONOURED = ("attention_mask", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")


def separate_layers(model: nn.Module) -> ExitStack:
    """Make the layers of `MIXERS` run a document at a time, and those of `_HANDS_NOTHING_ON` pass `document_ids` on.

    A layer that gets neither `document_ids` nor a plan computes what it did before.

    model: a language model of transformers. A second call changes nothing more.
    Returns a stack. Closing it undoes the changes.
    """
    undo = ExitStack()
    for module in model.modules():
        name = type(module).__name__
        if isinstance(module, PreTrainedModel) and id(module.config) not in SEPARATED:
            SEPARATED[id(module.config)] = module.config
            undo.callback(SEPARATED.pop, id(module.config), None)
        if name in MIXERS and not is_mixer(module):
            module.forward = partial(_run, module)  # type: ignore[method-assign]
            undo.callback(delattr, module, "forward")
        child = getattr(module, _HANDS_NOTHING_ON.get(name, ""), None)
        if child is not None and not hasattr(module, _HELD):
            setattr(module, _HELD, {})
            undo.callback(delattr, module, _HELD)
            undo.callback(module.register_forward_pre_hook(_hold, with_kwargs=True).remove)
            undo.callback(child.register_forward_pre_hook(partial(_hand_on, module), with_kwargs=True).remove)
    return undo


def separate_model(model: PreTrainedModel) -> None:
    """Run a model, but its head, once for each document behind its row's anchor, with the model's own attention."""
    decoder = model.base_model
    if not runs_whole(decoder):
        decoder.forward = partial(_run_model, decoder)  # type: ignore[method-assign]
        setattr(decoder, _HELD, {})
        model.register_forward_pre_hook(partial(_hold_for, decoder), with_kwargs=True)


def is_mixer(module: nn.Module) -> bool:
    """Whether `separate_layers` made this module run a document at a time."""
    return getattr(vars(module).get("forward"), "func", None) is _run


def runs_whole(decoder: nn.Module) -> bool:
    """Whether `separate_model` made this model run a document at a time."""
    return getattr(vars(decoder).get("forward"), "func", None) is _run_model


def holds_documents(decoder: nn.Module) -> bool:
    """Whether the whole model was given documents that it may not hand on to its decoder."""
    return bool(getattr(decoder, _HELD, None))


@torch.compiler.disable(reason=APART)
def _run(
    module: nn.Module,
    hidden_states: Tensor,
    document_ids: Tensor | None = None,
    plan: AttentionPlan | None = None,
    **given: Any,
) -> Tensor:
    """Compute a layer's output [B, T, M] for hidden states [B, T, M]."""
    forward = type(module).forward
    if plan is None and document_ids is None:
        return forward(module, hidden_states, **given)
    for name in ("cache_params", "past_key_values"):
        if given.pop(name, None) is not None:
            raise UserError(say_no_cache("past_key_values"))
    for name in _NOT_HONOURED:
        if given.pop(name, None) is not None:
            raise UserError(f"{name}: not honoured by `anchor`; remove it (documents are told by document_ids)")
    if plan is None:
        plan = remembered_plan(document_ids, hidden_states)
    return run_by_documents(partial(forward, module, **given), hidden_states, plan)


@torch.compiler.disable(reason=APART)
def _run_model(
    decoder: PreTrainedModel,
    input_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    plan: AttentionPlan | None = None,
    **given: Any,
) -> Any:
    """Compute a model's output: its hidden states are [B, T, M], and 0 at padding."""
    forward, held = type(decoder).forward, getattr(decoder, _HELD)
    document_ids = held.get("document_ids") if document_ids is None else document_ids
    plan = plan or held.get("plan")
    held.clear()
    if plan is None and document_ids is None:
        return forward(decoder, input_ids, **given)
    tokens = given.pop("inputs_embeds", None) if input_ids is None else input_ids
    mask, position_ids = given.pop("attention_mask", None), given.pop("position_ids", None)
    if mask is not None and not hides_nothing(mask, tokens.shape[1]):
        raise UserError(NOT_HONOURED)
    for name in ("use_cache", "past_key_values", "cache_params", "output_router_logits"):
        if given.pop(name, None):
            raise UserError(f"{name}: engine documents runs each document alone, and has none; leave it out")
    if plan is None:
        plan = remembered_plan(document_ids, tokens)
    if not plan.seqlens_q:
        raise UserError("document_ids: all are padding; leave the batch out")
    named = {"inputs_embeds" if input_ids is None else "input_ids": tokens, "position_ids": position_ids}
    stacks = {name: _stack(x, plan) for name, x in named.items() if x is not None}
    made: list[Any] = []
    for i, shape in enumerate(plan.batches[1]):
        own = {name: parts[i] for name, parts in stacks.items()}
        # Without a mask transformers takes a gap in position_ids for the end of a document.
        own["attention_mask"] = torch.ones(shape, dtype=torch.long, device=tokens.device)
        made.append(forward(decoder, **given, **own, use_cache=False))
    layers = [getattr(output, "hidden_states", None) or () for output in made]
    made[0].last_hidden_state = _unstack([output[0] for output in made], plan)
    if layers[0]:
        made[0].hidden_states = tuple(_unstack(list(parts), plan) for parts in zip(*layers, strict=True))
    return made[0]


def run_by_documents(forward: Any, x_BTM: Tensor, plan: AttentionPlan) -> Tensor:
    """Run a layer's forward on each document, its row's anchor in front. Returns [B, T, M], 0 at padding."""
    if not plan.seqlens_q:
        return torch.zeros_like(x_BTM) + x_BTM[:0].sum()
    return _unstack([forward(x) for x in _stack(x_BTM, plan)], plan)


def _stack(x: Tensor, plan: AttentionPlan) -> list[Tensor]:
    """Gather each document of x [B, T, ...] behind its row's anchor, and stack those of a length: [S, L, ...]."""
    (stacked, shapes), x = plan.batches, x.expand(plan.document_ids_BT.shape[0], *x.shape[1:])
    gathered = gather_keys(x.reshape(*x.shape[:2], 1, -1), stacked).reshape(-1, *x.shape[2:])
    parts = gathered.split([segments * tokens for segments, tokens in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def _unstack(parts: list[Tensor], plan: AttentionPlan) -> Tensor:
    """Return [B, T, ...] of what was made of `_stack`'s: each document's own tokens, and 0 at padding."""
    gathered = torch.cat([x.flatten(0, 1) for x in parts])
    return scatter_queries(gathered.index_select(0, plan.batches[0].own_slot_N), plan)


def _hold_for(decoder: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _hold(decoder, args, kwargs)


def _hold(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    held = {name: kwargs[name] for name in ("document_ids", "plan") if kwargs.get(name) is not None}
    setattr(layer, _HELD, held)


def _hand_on(
    layer: nn.Module, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs | getattr(layer, _HELD)
