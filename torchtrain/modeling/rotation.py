"""In which precision q and k are rotated and kept: RoPE in float32, and emulated roundings.

Transformers casts cos and sin to the model's dtype, so each product and sum of the rotation rounds. Here they stay in
float32, and attention rounds the rotated q and k once: arXiv 2411.13476, and the oracle's preset `paper_bf16`.

Upstream: transformers/models/llama/modeling_llama.py (LlamaRotaryEmbedding, apply_rotary_pos_emb).
"""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from anchorline.errors import UserError
from torchtrain.attention.hf import ROTATED, watch_queries
from torchtrain.attention.rounding import ROUNDED_BITS, round_mantissa
from torchtrain.modeling.head import hidden_states


def rotate_in_float32(model: nn.Module) -> None:
    """Make a model's rotary modules return cos and sin in float32. Raises UserError: none takes hidden states."""
    # Where layers differ in RoPE, the frequencies of each kind have a name of their own.
    found = [m for m in model.modules() if any(name.endswith("inv_freq") for name, _ in m.named_buffers(recurse=False))]
    for module in found:
        module.register_forward_pre_hook(_ask_for_float32, with_kwargs=True)
    if not found:
        raise _refusal(model, "none of its modules holds frequencies")
    for module in model.modules():
        setattr(module, ROTATED, True)


def round_queries_and_keys(model: nn.Module, place: Literal["before_rope", "after_rope"], bits: int) -> None:
    """Make every attention layer round its queries and keys, and their gradients (`torchtrain.attention.rounding`).

    model: in float32, with the layers q_proj and k_proj of LLaMA.
    place: before_rope: what the two layers give; after_rope: what attention gets, in Anchorline's attention alone.
    bits: stored mantissa bits that are left.
    Raises UserError: a layer has no such projections, or norms between them and RoPE.
    """
    layers = [module for module in model.modules() if hasattr(module, "q_proj") and hasattr(module, "k_proj")]
    if not layers or any(hasattr(module, "q_norm") for module in layers):
        raise UserError(
            "the rounding of q and k: the model's attention is not q_proj and k_proj, then RoPE; choose a LLaMA"
        )
    for layer in layers:
        if place == "after_rope":
            setattr(layer, ROUNDED_BITS, bits)
            continue
        for projection in (layer.q_proj, layer.k_proj):
            assert isinstance(projection, nn.Module)
            projection.register_forward_hook(partial(_round_output, bits=bits))


def _round_output(_module: nn.Module, _inputs: Any, x: Tensor, bits: int) -> Tensor:
    return round_mantissa(x, bits)


@torch.no_grad()
def check_rotation(model: Any) -> None:
    """Check on a few tokens that `anchor` gets queries and keys in float32. Raises UserError: a layer does not."""
    tokens = torch.arange(8, device=model.device)[None]
    batch = {"input_ids": tokens + 1, "position_ids": tokens, "document_ids": tokens // 4 + 1}
    with watch_queries() as dtypes:
        hidden_states(model, batch)
    if other := sorted(str(dtype) for dtype in dtypes - {torch.float32}):
        dtype = other[0].removeprefix("torch.")
        raise _refusal(model, f"its attention gets {dtype}: it casts what is rotated, or a layer rotates nothing")


def _ask_for_float32(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A rotary module takes hidden states for their dtype and device alone."""
    given = args[0] if args else kwargs.get("x")
    if not isinstance(given, Tensor):
        raise UserError(
            f"model.rotation: {type(module).__name__} is not called with hidden states first, so its tables cannot be "
            "kept in float32; set model.rotation to model"
        )
    asked = given.new_empty((), dtype=torch.float32)
    return ((asked, *args[1:]), kwargs) if args else (args, kwargs | {"x": asked})


def _refusal(model: nn.Module, why: str) -> UserError:
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    return UserError(
        f"model.rotation: {kind} cannot be made to rotate in float32, {why}; set model.rotation to model, or choose "
        "another model"
    )
