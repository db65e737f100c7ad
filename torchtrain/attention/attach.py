"""The entry for your own training loop: `attach` sets the `anchor` attention on a model and checks every layer.

model = torchtrain.attach(model)
model(input_ids, position_ids=position_ids, document_ids=document_ids, use_cache=False)
"""

import logging
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from anchorline.errors import UserError
from torchtrain.attention.engines.choice import resolve_engine
from torchtrain.attention.hf import KEEPS_ANCHOR, MISSING, announced, implementation_name, register
from torchtrain.attention.masks import MASKED_LAYER_TYPES, NOT_HONOURED, caps_scores, hides_nothing
from torchtrain.attention.recurrent import runs_whole, separate_layers, separate_model
from torchtrain.attention.separation import check_separation
from torchtrain.marks import IGNORED

logger = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=nn.Module)
DOCUMENTS = "documents"  # of `attach`'s engines


def attach(model: _Model, engine: str = "auto", keep_anchor: bool = False) -> _Model:
    """Make a causal language model of transformers train under the mask rule. A refusal leaves the model unchanged.

    It sets the implementation and reads it back, checks on 11 tokens that documents are separate (`check_separation`),
    and logs the engine in one line. The model then also refuses mistakes that attention cannot see: `document_ids` if
    another implementation is set, labels that are already shifted, and labels that transformers would shift over the
    ends of documents. It accepts an attention mask that is all ones. Without `document_ids`, a document begins
    wherever `position_ids` restart at 0, and there is no anchor.

    `torch.compile(model, fullgraph=True)` makes one graph, and a small one for the check of labels. Attention is one
    operation of the graph, with any engine. The backward pass computes attention again.

    Args:
        model: loaded, on the device and in the dtype it trains with, inside PEFT or not; before DDP, FSDP or
            compilation.
        engine: `auto`, or one of `torchtrain.attention.ENGINES`. `documents` runs the whole model once for each
            document, the row's anchor in front, with the family's own attention: slow, and right for every family.
        keep_anchor: in layers with a sliding window, the anchor stays visible beyond the window. By default the window
            hides it, as it hid the first tokens of a row when the model was trained, and as it will when it is used.

    Returns:
        The same model.

    Raises:
        UserError: no such model, an engine that cannot run here, a family that ignores the setting, or a layer that
            leaks, by name.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    if not isinstance(inner, PreTrainedModel) or inner.get_output_embeddings() is None:
        raise UserError(
            f"attach: {type(model).__name__} is not a causal language model of transformers; give one of "
            "AutoModelForCausalLM, before DDP, FSDP or torch.compile wrap it"
        )
    if inner.device.type == "meta":
        raise UserError("attach: the model is on the device meta, and has no weights; load them first")
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
    logger.warning(
        "attached: %s, attention %s on %s in %s, documents are separate%s",
        *(type(inner).__name__, chosen, inner.device.type, inner.dtype, _longest_row(inner)),
    )
    return model


def _attach_whole(model: _Model, inner: PreTrainedModel) -> _Model:
    separate_model(inner)
    _add_hooks(model, inner)
    logger.warning("attached: %s, it runs a document at a time", type(inner).__name__)
    return model


def _add_hooks(model: nn.Module, inner: PreTrainedModel) -> None:
    for module, hook in ((inner.base_model, _read_restarts), (inner.base_model, _check_masks), (model, _check_labels)):
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


_FLATTENED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def _read_restarts(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Without `document_ids`, let a document begin wherever `position_ids` are 0, after the row's start too.

    So transformers' DataCollatorWithFlattening and TRL's `padding_free` give documents. None of them is an anchor.
    """
    if torch.compiler.is_compiling() or kwargs.get("document_ids") is not None:
        return None
    document_ids = _documents_of(kwargs.get("position_ids"), kwargs.get("cu_seq_lens_q"))
    if document_ids is None:
        return None
    return args, {name: x for name, x in kwargs.items() if name not in _FLATTENED} | {"document_ids": document_ids}


def _documents_of(position_ids: Any, offsets: Tensor | None) -> Tensor | None:
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2:
        return None
    starts = position_ids == 0
    if offsets is None and not bool(starts[:, 1:].any()):
        return None
    if offsets is not None and starts.flatten().nonzero().flatten().tolist() != offsets[:-1].tolist():
        raise UserError("cu_seq_lens_q: begins documents where position_ids do not restart; give document_ids")
    return starts.cumsum(1)


def _check_masks(
    decoder: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse `document_ids` that would be ignored. Drop a mask of all ones before a family adds to it."""
    if runs_whole(decoder):
        return None
    implementation = str(decoder.config.get_text_config(decoder=True)._attn_implementation)
    if not implementation.startswith(implementation_name("auto")):
        if kwargs.get("document_ids") is not None:
            raise UserError(
                f"document_ids: attn_implementation={implementation!r} ignores them in silence; set "
                f"model.set_attn_implementation({implementation_name('auto')!r}) again"
            )
        return None
    mask, tokens = kwargs.get("attention_mask"), _tokens(args, kwargs)
    if torch.compiler.is_compiling():
        return None if tokens is None else (args, _read_in_graph(decoder, tokens, kwargs))
    if tokens is not None:
        _check_length(decoder, _positions(decoder), tokens.shape[1], kwargs.get("position_ids"))
    if isinstance(mask, Tensor) and tokens is not None and hides_nothing(mask, tokens.shape[1]):
        return args, kwargs | {"attention_mask": None}
    return None


def _positions(decoder: PreTrainedModel) -> int | None:
    return getattr(decoder.config.get_text_config(decoder=True), "max_position_embeddings", None)


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
    """Refuse labels that would be shifted twice, or not at all. A check ends with the first batch that decides it."""
    tokens = _tokens(args, kwargs)
    labels, targets, document_ids = (kwargs.get(name) for name in ("labels", "shift_labels", "document_ids"))
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
    if targets is not None:
        if labels is None and not getattr(model, "_anchor_told_labels", False):
            logger.warning("shift_labels without labels: transformers computes no loss; %s", _ADVICE)
            model._anchor_told_labels = True
        if not tokens.is_floating_point():
            _check_targets(model, targets, tokens)
        return
    if labels is None:
        return
    if not tokens.is_floating_point():
        _check_shifted(model, labels, tokens)
    _check_document_ends(model, labels, document_ids)


def _check_targets(model: Any, targets: Tensor, tokens: Tensor) -> None:
    """Refuse targets that are the tokens themselves, of rows whose tokens differ."""
    if targets.shape != tokens.shape or getattr(model, "_anchor_saw_targets", False):
        return
    used = targets != IGNORED
    if not bool((used[:, :-1] & (tokens[:, :-1] != tokens[:, 1:])).any()):
        return
    if bool(((targets == tokens) | ~used).all()):
        raise UserError(f"shift_labels: each is its own token and not the next one; {_ADVICE}")
    model._anchor_saw_targets = True


def _check_shifted(model: Any, labels: Tensor, tokens: Tensor) -> None:
    """Refuse labels that are already shifted, which transformers shifts once more."""
    if getattr(model, "_anchor_saw_labels", False):
        return
    used = labels != IGNORED
    if not bool(((labels[:, :-1] == tokens[:, 1:]) | ~used[:, :-1]).all()):
        model._anchor_saw_labels = True
    elif bool((used & (labels != tokens)).any()):
        raise UserError(
            "labels: each is already the next token, and transformers shifts labels by one more; give them as "
            f"shift_labels: {_ADVICE}"
        )


def _check_document_ends(model: Any, labels: Tensor, document_ids: Tensor | None) -> None:
    """Refuse targets beyond a document's end. The anchor may have one: what follows it is what a model says first."""
    if document_ids is None or document_ids.shape != labels.shape or getattr(model, "_anchor_saw_ends", False):
        return
    used, ends = labels != IGNORED, (document_ids[:, :-1] > 0) & (document_ids[:, 1:] != document_ids[:, :-1])
    if bool((ends & used[:, 1:]).any()):
        raise UserError(
            "labels: transformers shifts them over the ends of documents, so that the last token of one learns the "
            f"first of the next; set them to {IGNORED} where a document or padding begins, or give shift_labels: "
            f"{_ADVICE}"
        )
    model._anchor_saw_ends = bool(ends.any() & used.any())


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


def _read_in_graph(decoder: PreTrainedModel, tokens: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    given = [kwargs.get(name) for name in ("document_ids", "position_ids", "cu_seq_lens_q", "attention_mask")]
    if given[0] is None and given[1] is None:
        return kwargs  # the attention layers refuse it
    kept = kwargs if given[0] is not None else {name: x for name, x in kwargs.items() if name not in _FLATTENED}
    document_ids = torch.ops.anchorline.read_documents(*given, tokens.shape[1], _positions(decoder))
    return kept | {"attention_mask": None, "document_ids": document_ids}


def _read_documents(
    document_ids: Tensor | None,
    position_ids: Tensor | None,
    offsets: Tensor | None,
    mask: Tensor | None,
    tokens: int,
    held: int | None,
) -> Tensor:
    if mask is not None and not hides_nothing(mask, tokens):
        raise UserError(NOT_HONOURED)
    _check_length(_told(held), held, tokens, position_ids)
    if document_ids is not None:
        return document_ids.clone()
    if (read := _documents_of(position_ids, offsets)) is None:
        raise UserError(MISSING)
    return read.to(torch.int64)


def _labels_in_graph(
    tokens: Tensor, labels: Tensor | None, targets: Tensor | None, document_ids: Tensor | None
) -> Tensor:
    _check_given(SimpleNamespace(), tokens, labels, targets, document_ids)
    return _used(tokens, labels, targets).clone()


def _used(tokens: Tensor, labels: Tensor | None, targets: Tensor | None, *_: Any) -> Tensor:
    used = labels if targets is None else targets
    assert used is not None
    return used


for _name, _schema, _run, _shape in (
    (
        "read_documents",
        "Tensor? document_ids, Tensor? position_ids, Tensor? offsets, Tensor? mask, SymInt tokens, int? held",
        _read_documents,
        lambda ids, positions, *_: torch.empty_like(ids) if ids is not None else torch.empty_like(positions).long(),
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
