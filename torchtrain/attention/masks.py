"""Replaces transformers' mask builders, where `document_ids` are the mask. Other masks are refused, not dropped.

Upstream: transformers/masking_utils.py (`create_causal_mask` and its siblings, AttentionMaskInterface).

Legend: T tokens of a row.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.attention.callers import is_generating, say_no_cache
from torchtrain.attention.remember import remember

# A test compares these lists with transformers' source. Whatever an upgrade adds is in none of them, and is refused.
# `document_ids` replace these mask functions:
MASKS_TOLD = {
    "causal_mask_function",
    "and_masks",
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
}
# These hide nothing of a row up to the length of this setting. For a longer row a window is passed to the layer
# (`window_of`), and a chunk is refused.
MASKS_WITH_A_LENGTH = {"sliding_window_overlay": "sliding_window", "chunked_overlay": "attention_chunk_size"}
# Layers in which attention alone carries one token into another, and the setting that limits its reach:
MASKED_LAYER_TYPES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
LAYER_TYPES = {"full_attention", *MASKED_LAYER_TYPES}
# Layers that carry a state from token to token, which `torchtrain.attention.recurrent` separates, and layers that
# compute each token alone. They need an attached model: `SEPARATED` holds its config by id.
CARRY_A_STATE = {"linear_attention", "conv", "hybrid"}
MORE_LAYER_TYPES = {*CARRY_A_STATE, "moe", "mlp"}
SEPARATED = weakref.WeakValueDictionary[int, Any]()

NOT_HONOURED = (
    "attention_mask: not honoured by `anchor` unless it is all ones; pack rows with torchtrain.pack (TRL: set "
    "packing=True, or padding_free=True and max_length=None), or give padding the document id -1"
)


def read_mask(
    *_: Any,
    config: Any,
    q_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    q_offset: Any = 0,
    use_vmap: bool = False,
    local_size: int | None = None,
    ranks: int = 1,
    **__: Any,
) -> Tensor | None:
    """Replace transformers' mask builder. It is called once or twice a forward pass.

    `ranks`: how many share a row. Each has `q_length` tokens of it. Returns None where `document_ids` are the whole
    mask. Otherwise a mask that holds a layer's window or a refusal, for `window_of`. A refusal is raised only by a
    layer that gets the mask: some families build masks that none of their layers takes. Raises UserError: layers that
    are not attention, padding, a KV cache, a mask function that the caller adds.
    """
    for i, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind in LAYER_TYPES or (kind in MORE_LAYER_TYPES and SEPARATED.get(id(config)) is config):
            continue
        fix = "call torchtrain.attach(model)" if kind in MORE_LAYER_TYPES else "choose another model"
        raise UserError(
            f"layers.{i}: {kind} by config.layer_types, which can carry one document into another; `anchor` alone "
            f"replaces attention only: {fix}"
        )
    if int(q_offset):
        raise UserError(say_no_cache("past_key_values"))
    if attention_mask is not None and not hides_nothing(attention_mask, q_length):
        raise UserError(say_no_cache("generate") if is_generating() else NOT_HONOURED)
    if use_vmap:
        raise UserError(
            "or_mask_function, and_mask_function: not honoured by `anchor`; express the mask in document_ids"
        )
    refusal, window, row = None, None, q_length * ranks
    if torch.compiler.is_compiling():
        names = functions_by_length(mask_function, config, local_size)
    else:
        names = functions_in(mask_function)
    for name in sorted(names - MASKS_TOLD):
        setting = MASKS_WITH_A_LENGTH.get(name)
        if setting is None or local_size is None:
            refusal = f"attention_mask: transformers' {name} is not honoured by `anchor`; choose a model without it"
        elif local_size < row and setting == "sliding_window":
            window = local_size
        elif local_size < row:
            refusal = (
                f"{setting}: {local_size} would hide keys of a row of {row} tokens, which `anchor` does not honour; "
                f"shorten the row, or set config.{setting}=None where the model is trained to see that far"
            )
    if refusal is None and window is None:
        return None
    mask = torch.zeros((), dtype=torch.bool).expand(1, 1, row, row)
    mask._anchor_says = refusal or window  # type: ignore[attr-defined]
    return mask


def layer_windows(config: Any) -> Counter[int | None]:
    """Count a config's layers with attention by their sliding window. None: without a window."""
    text = config.get_text_config(decoder=True)
    window, layers = getattr(text, "sliding_window", None), text.num_hidden_layers
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * layers
    attending = [kind for kind in kinds if kind not in MORE_LAYER_TYPES or kind == "hybrid"]
    return Counter(window if kind == "sliding_attention" else None for kind in attending)


def caps_scores(config: Any) -> bool:
    """Whether a model's attention caps its logits (Gemma 2)."""
    return getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None


def hides_nothing(mask: Tensor, tokens: int) -> bool:
    """Whether a padding mask [B, T] is all ones, as from every collator. It is read once and the answer kept."""
    fits = mask.ndim == 2 and mask.shape[1] == tokens
    return fits and remember("_anchor_hides_nothing", mask, lambda: bool((mask == 1).all()))


def hide_nothing(ids_BT: Tensor) -> Tensor:
    """Return a padding mask bool [B, T] of ones: without one transformers asks the device whether rows are packed."""
    mask_BT = torch.ones(ids_BT.shape, dtype=torch.bool, device=ids_BT.device)
    remember("_anchor_hides_nothing", mask_BT, lambda: True)
    return mask_BT


def functions_in(mask_function: Callable[..., Any]) -> set[str]:
    """Names of the functions that make up a mask of transformers: each holds others in its closure."""
    names = {getattr(mask_function, "__qualname__", type(mask_function).__qualname__).partition(".")[0]}
    for cell in getattr(mask_function, "__closure__", None) or ():
        held = cell.cell_contents if isinstance(cell.cell_contents, tuple) else (cell.cell_contents,)
        names = names.union(*(functions_in(x) for x in held if callable(x)))
    return names


def functions_by_length(mask_function: Callable[..., Any], config: Any, local_size: int | None) -> set[str]:
    """The same under torch.compile, which cannot read closures: the mask's length tells the names."""
    names = {mask_function.__code__.co_qualname.partition(".")[0]}
    if local_size is None:
        return names
    named = {name for name, setting in MASKS_WITH_A_LENGTH.items() if getattr(config, setting, None) == local_size}
    return names | (named or {"mask of another length"})


def window_of(mask: Any) -> int | None:
    """Return the window in a mask of `read_mask`; None without a mask. Raises UserError: a refusal, or another mask."""
    if mask is None:
        return None
    says: str | int = getattr(mask, "_anchor_says", NOT_HONOURED)
    if isinstance(says, str):
        raise UserError(says)
    return says
