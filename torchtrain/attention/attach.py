"""The entry for your own training loop: `attach` sets the `anchor` attention on a model and checks every layer.

model = torchtrain.attach(model)
model(input_ids, position_ids=position_ids, document_ids=document_ids, use_cache=False)
"""

import copy
import inspect
import logging
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from anchorline.errors import UserError
from torchtrain.attention.engines.choice import resolve_engine
from torchtrain.attention.hf import KEEPS_ANCHOR, MISSING, announced, implementation_name, register
from torchtrain.attention.masks import MASKED_LAYER_TYPES, NOT_HONOURED, caps_scores, hides_nothing, is_generating
from torchtrain.attention.recurrent import holds_documents, runs_whole, separate_layers, separate_model
from torchtrain.attention.separation import check_separation
from torchtrain.marks import IGNORED

logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)
# Relative: a power in float32 is right to a few roundings on any device. bfloat16 rounds to 2**-9.
_DEVICES_DIFFER = 2.0**-20
DOCUMENTS = "documents"  # of `attach`'s engines


def attach(model: _Model, engine: str = "auto", keep_anchor: bool = False) -> _Model:
    """Make a causal language model of transformers train under the mask rule. A refusal leaves the model unchanged.

    It sets the attention implementation, checks on 11 tokens that documents are separate (`check_separation`), and logs
    the engine in one line. From then on every batch is checked, too. The model refuses `document_ids` if another
    implementation is set, labels that are already shifted, and labels that transformers would shift over the ends of
    documents. It accepts an attention mask that is all ones or numbers the documents. Without `document_ids`, a
    document begins wherever a position is not the one before plus one, and there is no anchor.

    `torch.compile(model, fullgraph=True)` works. Attention is one operation of the graph, with any engine, and is
    computed again in the backward pass.

    model: loaded, on the device and in the dtype it trains with, inside PEFT or not; before DDP, FSDP or compilation.
    engine: `auto`, or one of `torchtrain.attention.ENGINES`. `documents` runs the whole model once for each document,
        the row's anchor in front, with the family's own attention: slow, and right for every family.
    keep_anchor: in layers with a sliding window, keep the anchor visible beyond the window. By default the window
        hides it, as it will when the model is used.
    Returns the same model.
    Raises UserError: no such model, an engine that cannot run here, a family that ignores the setting, a layer that
        leaks, by name, or RoPE that is not the config's.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise UserError(
            f"attach: {type(model).__name__} is not a causal language model of transformers; give one of "
            "AutoModelForCausalLM, before DDP, FSDP or torch.compile wrap it"
        )
    if inner.device.type == "meta":
        raise UserError("attach: the model is on the device meta, and has no weights; load them first")
    _check_frequencies(inner)
    if engine == DOCUMENTS:
        if keep_anchor:
            raise UserError(
                "keep_anchor: engine documents runs each document as the model was trained; choose flex or dense"
            )
        return _attach_whole(model, inner)
    chosen = resolve_engine(engine, inner.device, inner.dtype, capped=caps_scores(inner.config))
    name = implementation_name(engine)
    register()
    announced.add((chosen, inner.device.type, inner.dtype))  # in the line below
    _copy_config(inner)
    before = inner.config._attn_implementation
    undo = separate_layers(inner)
    try:
        inner.set_attn_implementation(name)
        _read_back(inner, name)
        check_separation(model)
    except BaseException as error:
        undo.close()
        inner.set_attn_implementation(before or "eager")
        if isinstance(error, UserError):
            raise UserError(f'{error}; or run each document alone: attach(model, engine="{DOCUMENTS}")') from error
        raise
    for module in inner.modules():
        setattr(module, KEEPS_ANCHOR, keep_anchor)
    _add_hooks(model, inner)
    limits = _longest_row(inner)
    logger.log(
        logging.WARNING if limits else logging.INFO,
        "attached: %s, attention %s on %s in %s, documents are separate%s",
        *(type(inner).__name__, chosen, inner.device.type, inner.dtype, limits),
    )
    return model


def _copy_config(model: PreTrainedModel) -> None:
    """Give a model a config of its own: other models may be made from the one that it was made from."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PretrainedConfig) and id(value) in copies:
                setattr(module, name, copies[id(value)])


def _attach_whole(model: _Model, inner: PreTrainedModel) -> _Model:
    _add_hooks(model, inner)
    separate_model(inner)
    logger.info("attached: %s, it runs a document at a time", type(inner).__name__)
    return model


def _add_hooks(model: nn.Module, inner: PreTrainedModel) -> None:
    for module, check in ((model, _check_labels), (inner.base_model, _check_masks)):
        setattr(module, _ARGUMENTS, tuple(inspect.signature(type(module).forward).parameters)[1:])
        for hook in (_read_positions, check):
            if hook not in module._forward_pre_hooks.values():  # attached before
                module.register_forward_pre_hook(hook, with_kwargs=True)


def _read_back(model: PreTrainedModel, name: str) -> None:
    """Refuse families that ignore the setting: their attention bypasses transformers' interface."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != name:
        raise UserError(
            f"attach: {type(model).__name__} computes attention in its own way and ignores "
            f"attn_implementation={name!r} (it runs {config._attn_implementation!r}); choose another model"
        )


def _check_frequencies(model: PreTrainedModel) -> None:
    """Refuse RoPE that was changed after the model was built: in its config, in its module, or by a cast."""
    config = model.config.get_text_config(decoder=True)
    for name, module in model.named_modules():
        own = [x for x, _ in module.named_buffers(recurse=False) if x.endswith("inv_freq") and "original" not in x]
        if not own or not isinstance(config, type(getattr(module, "config", None))):
            continue
        built: Any = type(module)(config)
        for buffer in own:
            kept, first = getattr(module, buffer), buffer.replace("inv_freq", "original_inv_freq")
            if any(kind in str(module.rope_type) for kind in ("dynamic", "longrope")):  # those follow the longest row
                kept = getattr(module, first, kept)
            if kept.dtype in (torch.bfloat16, torch.float16):
                raise UserError(
                    f"{name}.{buffer}: rounded to {kept.dtype} when the model was cast, which misplaces far tokens; "
                    f"load the model in its dtype: from_pretrained(..., dtype={kept.dtype})"
                )
            wanted, scaling = getattr(built, buffer).to(kept), buffer.replace("inv_freq", "attention_scaling")
            same = kept.shape == wanted.shape and torch.allclose(kept, wanted, rtol=_DEVICES_DIFFER, atol=0)
            if not same or getattr(module, scaling, None) != getattr(built, scaling, None):
                raise UserError(
                    f"{name}.{buffer}: not what model.config.rope_parameters make; RoPE is set when a model is built: "
                    "change a config first (torchtrain.extend), then load with from_pretrained(..., config=config)"
                )


def _longest_row(model: PreTrainedModel) -> str:
    """Say what 11 tokens do not show: the longest row that is accepted, and how far windows reach."""
    config = model.config.get_text_config(decoder=True)
    kinds, said = getattr(config, "layer_types", None), ""
    for kind, setting in MASKED_LAYER_TYPES.items():
        length = getattr(config, setting, None)
        if length is None or (kinds is not None and kind not in kinds):
            continue
        if kind == "chunked_attention":
            said += f"; a row of more than {length:,} tokens is refused ({setting})"
        else:
            said += f"; some layers see {length:,} tokens of a document ({setting})"
    return said


_ARGUMENTS = "_anchor_arguments"  # attribute of a module with hooks: the names of its forward's arguments
# What transformers' DataCollatorWithFlattening says of documents beside `position_ids`:
_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def _decoder(model: Any) -> PreTrainedModel:
    return (model.get_base_model() if hasattr(model, "get_base_model") else model).base_model


def _read_positions(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Without `document_ids`, number documents by `position_ids` (transformers' collator, TRL's `padding_free`)."""
    named = dict(zip(getattr(model, _ARGUMENTS)[1:], args[1:], strict=False))
    args, kwargs = args[:1], kwargs | named
    positions, tokens, decoder = kwargs.get("position_ids"), _tokens(args, kwargs), _decoder(model)
    given = (kwargs.get(name) is not None for name in ("document_ids", "plan", "past_key_values"))
    if tokens is None or not isinstance(positions, Tensor) or positions.ndim != 2:
        return args, kwargs
    if any(given) or not (runs_whole(decoder) or _is_ours(decoder)) or (model is decoder and holds_documents(decoder)):
        return args, kwargs
    if positions.shape[0] not in (1, tokens.shape[0]) or positions.shape[1] != tokens.shape[1]:
        raise UserError(f"position_ids: {list(positions.shape)} for {list(tokens.shape[:2])} tokens; give one for each")
    said = [kwargs.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")]
    if len(positions) == 1:
        positions = positions.expand(tokens.shape[0], -1)
    if torch.compiler.is_compiling():
        document_ids = torch.ops.anchorline.read_positions(positions, *said)
    else:
        document_ids = _documents_of(positions, *said, told=decoder)
    return args, {name: x for name, x in kwargs.items() if name not in _FLATTENED} | {"document_ids": document_ids}


def _documents_of(
    positions_BT: Tensor, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None, seq_idx: Tensor | None, told: Any
) -> Tensor:
    """Number documents from 1 as `find_packed_sequence_indices`; a row may begin inside a document."""
    begins_BT = torch.diff(positions_BT, prepend=positions_BT[:, :1]) != 1
    for name, offsets in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        said = None if offsets is None else offsets.unique_consecutive().tolist()  # padded with the last one to a size
        if said is not None and said != [*begins_BT.flatten().nonzero().flatten().tolist(), begins_BT.numel()]:
            raise UserError(f"{name}: begins documents elsewhere than position_ids; give document_ids")
    ids_BT = begins_BT.cumsum(1)
    if seq_idx is not None and not _has_documents(seq_idx, ids_BT):
        raise UserError("seq_idx: begins documents elsewhere than position_ids; give document_ids")
    if not getattr(told, "_anchor_told_positions", False):
        told._anchor_told_positions = True
        logger.warning(
            "document_ids: read from position_ids, one begins wherever a position is not the one before plus one; "
            "there is no anchor (rows of torchtrain.pack have one)"
        )
    return ids_BT


def _has_documents(segments: Tensor, document_ids: Tensor) -> bool:
    """Whether segments, numbered in any way, begin where documents begin."""
    if segments.shape != document_ids.shape:
        return False
    begins, found = (x[:, 1:] != x[:, :-1] for x in (segments, document_ids.to(segments.device)))
    return bool((begins == found).all())


def _documents_given(kwargs: dict[str, Any]) -> Tensor | None:
    ids = kwargs.get("document_ids")
    if ids is None and kwargs.get("plan") is not None:
        ids = kwargs["plan"].document_ids_BT
    return ids if isinstance(ids, Tensor) else None


def _is_ours(decoder: PreTrainedModel) -> bool:
    implementation = str(decoder.config.get_text_config(decoder=True)._attn_implementation)
    return implementation.startswith(implementation_name("auto"))


def _check_masks(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse `document_ids` that would be ignored. Drop a mask that hides nothing before a family adds to it."""
    if not runs_whole(decoder) and not _is_ours(decoder):
        if kwargs.get("document_ids") is not None:
            implementation = decoder.config.get_text_config(decoder=True)._attn_implementation
            raise UserError(
                f"document_ids: attn_implementation={implementation!r} ignores them in silence; set "
                f"model.set_attn_implementation({implementation_name('auto')!r}) again"
            )
        return None
    document_ids, mask, tokens = _documents_given(kwargs), kwargs.get("attention_mask"), _tokens(args, kwargs)
    if document_ids is None or tokens is None:
        generates = kwargs.get("use_cache") or (not torch.compiler.is_compiling() and is_generating())
        if tokens is not None and runs_whole(decoder) and not holds_documents(decoder) and not generates:
            raise UserError(MISSING)  # it would take a row for one document
        return None  # the attention layers refuse it, or it generates
    held = getattr(decoder.config.get_text_config(decoder=True), "max_position_embeddings", None)
    given = mask, tokens.shape[1], kwargs.get("position_ids"), held
    if torch.compiler.is_compiling():
        kwargs = kwargs | {"document_ids": torch.ops.anchorline.check_masks(document_ids, *given)}
    else:
        _check_given_mask(document_ids, *given, told=decoder)
    return args, kwargs | {"attention_mask": None}


def _check_given_mask(
    document_ids: Tensor, mask: Any, tokens: int, position_ids: Tensor | None, held: int | None, told: Any
) -> None:
    """Accept a mask of ones, and one that numbers the documents from 1, as axolotl's collators do."""
    _check_length(told, held, tokens, position_ids)
    is_tensor = isinstance(mask, Tensor)
    if mask is None or (is_tensor and hides_nothing(mask, tokens)):
        return
    if not is_tensor or mask.ndim != 2 or mask.dtype == torch.bool or not bool((mask > 0).all()):
        raise UserError(NOT_HONOURED)
    if not _has_documents(mask, document_ids):
        raise UserError("attention_mask: its segments are not the documents of document_ids or position_ids; remove it")


def _check_length(model: Any, held: int | None, tokens: int, position_ids: Tensor | None) -> None:
    """Warn of positions beyond the model's, at the first row that is longer than it holds."""
    if held is None or tokens <= held or getattr(model, "_anchor_saw_length", False):
        return
    model._anchor_saw_length = True
    last = tokens - 1 if position_ids is None else int(position_ids.max())
    if last >= held:
        logger.warning(
            "position_ids: reach %s, and the model holds %s positions; load it with config=torchtrain.extend(config, "
            "%s), which sets RoPE for longer rows",
            *(f"{last:,}", f"{held:,}", tokens),
        )


_ADVICE = "torchtrain.collate makes both `labels` and `shift_labels` of packed rows"


def _check_labels(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse labels that would be shifted twice, not at all, or over the ends of documents. It reads every batch."""
    tokens = _tokens(args, kwargs)
    labels, targets, document_ids = kwargs.get("labels"), kwargs.get("shift_labels"), _documents_given(kwargs)
    if tokens is None or (labels is None and targets is None):
        return None
    if torch.compiler.is_compiling():
        used = "labels" if targets is None else "shift_labels"
        return args, kwargs | {used: torch.ops.anchorline.check_labels(tokens, labels, targets, document_ids)}
    _check_given(model, tokens, labels, targets, document_ids)
    return None


def _check_given(
    model: Any, tokens: Tensor, labels: Tensor | None, targets: Tensor | None, document_ids: Tensor | None
) -> None:
    """Check what a loss is made of. On a GPU the host waits for it once."""
    if targets is not None and labels is None and not getattr(model, "_anchor_told_labels", False):
        logger.warning("shift_labels without labels: transformers computes no loss; %s", _ADVICE)
        model._anchor_told_labels = True
    if targets is not None:
        checks = {f"shift_labels: each is its own token and not the next one; {_ADVICE}": _are_tokens(targets, tokens)}
    else:
        assert labels is not None
        checks = {
            "labels: each is already the next token, and transformers shifts labels by one more; give them as "
            f"shift_labels: {_ADVICE}": _are_shifted(labels, tokens),
            "labels: transformers shifts them over the ends of documents, so that the last token of one learns the "
            f"first of the next; set them to {IGNORED} where a document or padding begins, or give shift_labels: "
            f"{_ADVICE}": _cross_ends(labels, document_ids),
        }
    found = {message: wrong for message, wrong in checks.items() if wrong is not None}
    if found:
        for message, wrong in zip(found, torch.stack([*found.values()]).tolist(), strict=True):
            if wrong:
                raise UserError(message)


def _are_tokens(targets: Tensor, tokens: Tensor) -> Tensor | None:
    """Whether targets are the tokens themselves, in rows whose tokens differ."""
    if targets.shape != tokens.shape:
        return None
    used = targets != IGNORED
    return (used[:, :-1] & (tokens[:, :-1] != tokens[:, 1:])).any() & ((targets == tokens) | ~used).all()


def _are_shifted(labels: Tensor, tokens: Tensor) -> Tensor | None:
    """Whether labels are already shifted, which transformers shifts once more."""
    if labels.shape != tokens.shape:
        return None
    used = labels != IGNORED
    return ((labels[:, :-1] == tokens[:, 1:]) | ~used[:, :-1]).all() & (used & (labels != tokens)).any()


def _cross_ends(labels: Tensor, document_ids: Tensor | None) -> Tensor | None:
    """Whether a target is beyond its document's end. The anchor may have one: what a model says first."""
    if document_ids is None or document_ids.shape != labels.shape:
        return None
    ids = document_ids.to(labels.device)
    ends = (ids[:, :-1] > 0) & (ids[:, 1:] != ids[:, :-1])
    return (ends & (labels[:, 1:] != IGNORED)).any()


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    for value in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if isinstance(value, Tensor):
            return value
    return None


# A check that reads a batch's numbers cannot be traced by torch.compile. In a graph each check is one operation, which
# returns what it checked, so that the graph keeps it. It reads every batch, and on a GPU the host waits for it.


@cache
def _told(held: int | None) -> SimpleNamespace:
    """What was printed about this process's compiled models with so many positions."""
    return SimpleNamespace()


def _check_masks_in_graph(document_ids: Tensor, *given: Any) -> Tensor:
    _check_given_mask(document_ids, *given, told=_told(given[-1]))
    return document_ids.clone()


def _labels_in_graph(
    tokens: Tensor, labels: Tensor | None, targets: Tensor | None, document_ids: Tensor | None
) -> Tensor:
    _check_given(_told(None), tokens, labels, targets, document_ids)
    return _used(tokens, labels, targets).clone()


def _used(tokens: Tensor, labels: Tensor | None, targets: Tensor | None, *_: Any) -> Tensor:
    used = labels if targets is None else targets
    assert used is not None
    return used


for _name, _schema, _run, _shape in (
    (
        "read_positions",
        "Tensor positions, Tensor? cu_seq_lens_q, Tensor? cu_seq_lens_k, Tensor? seq_idx",
        lambda *given: _documents_of(*given, told=_told(None)),
        lambda positions, *_: torch.empty_like(positions, dtype=torch.int64, memory_format=torch.contiguous_format),
    ),
    (
        "check_masks",
        "Tensor document_ids, Tensor? mask, SymInt tokens, Tensor? position_ids, int? held",
        _check_masks_in_graph,
        lambda ids, *_: torch.empty_like(ids),
    ),
    (
        "check_labels",
        "Tensor tokens, Tensor? labels, Tensor? targets, Tensor? document_ids",
        _labels_in_graph,
        lambda *given: torch.empty_like(_used(*given)),
    ),
):
    torch.library.define(f"anchorline::{_name}", f"({_schema}) -> Tensor")
    torch.library.impl(f"anchorline::{_name}", "CompositeExplicitAutograd", _run)
    torch.library.register_fake(f"anchorline::{_name}", _shape)
