"""Named intermediates ("taps") of a transformers decoder, under the oracle's names, from hooks that change nothing.

The names are those of `jaxref.model`: `embed`, `layers.3.k_rope`, `final_norm`, `logits`, ... so that the two sides
compare key by key. Hooks only read; the model computes what it computes without them.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · M model width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Taps = dict[str, np.ndarray]

# What a layer's submodules put out -> the tap's name; the ones marked True are split into heads.
_MODULES = {
    "input_layernorm": ("input_norm", False),
    "self_attn.q_proj": ("q", True),
    "self_attn.k_proj": ("k", True),
    "self_attn.v_proj": ("v", True),
    "self_attn.o_proj": ("attn_out", False),
    "post_attention_layernorm": ("post_norm", False),
    "mlp": ("mlp", False),
}
_PROBE = "parity_probe"


@torch.no_grad()
def capture_taps(model: nn.Module, **inputs: Any) -> Taps:
    """Run `model(**inputs)` once; return every tap, in float32 at least, heads apart: [B, T, H, D] and [B, T, M].

    Args:
        model: a Llama, Mistral, Qwen2 or Qwen3 for causal language modelling, on any device, in any dtype.
        inputs: what the model's forward takes (`input_ids`, `position_ids`, `document_ids`, `plan`, ...).
    """
    taps: Taps = {}
    with _hooks(model, taps):
        taps["logits"] = _widen(model(**inputs, use_cache=False).logits)
    return taps


@contextmanager
def _hooks(model: Any, taps: Taps) -> Iterator[None]:
    decoder, head_dim = model.model, model.model.layers[0].self_attn.head_dim
    with ExitStack() as stack:

        def on_output(module: nn.Module, name: str, heads: bool = False) -> None:
            def read(_module: nn.Module, _inputs: Any, output: Any) -> None:
                x = _widen(output[0] if isinstance(output, tuple) else output)
                taps[name] = x.reshape(*x.shape[:2], -1, head_dim) if heads else x

            stack.callback(module.register_forward_hook(read).remove)

        def on_input(module: nn.Module, name: str) -> None:
            def read(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                taps[name] = _widen(inputs[0])

            stack.callback(module.register_forward_pre_hook(read).remove)

        def read_table(_module: nn.Module, _inputs: Any, tables: tuple[Tensor, Tensor]) -> None:
            halves_BTC = [x[..., : x.shape[-1] // 2] for x in tables]  # each is there twice, for both of a pair
            taps["rope_table"] = _widen(torch.cat(halves_BTC, dim=-1))

        stack.callback(decoder.rotary_emb.register_forward_hook(read_table).remove)
        on_output(decoder.embed_tokens, "embed")
        for i, layer in enumerate(decoder.layers):
            for path, (name, heads) in _MODULES.items():
                on_output(layer.get_submodule(path), f"layers.{i}.{name}", heads)
            on_input(layer.post_attention_layernorm, f"layers.{i}.attn_residual")
            on_output(layer, f"layers.{i}.residual")
            for norm in ("q_norm", "k_norm"):  # Qwen3
                if hasattr(layer.self_attn, norm):
                    on_output(getattr(layer.self_attn, norm), f"layers.{i}.{norm}", heads=True)
        on_output(decoder.norm, "final_norm")
        stack.enter_context(_probe_attention(model, taps))
        yield


@contextmanager
def _probe_attention(model: Any, taps: Taps) -> Iterator[None]:
    """Put a reader around the model's attention function: rotated q and k go in, the heads' output comes out."""
    chosen = model.config._attn_implementation
    attend: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS[chosen]

    def probe(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        at = f"layers.{module.layer_idx}"
        taps[f"{at}.q_rope"], taps[f"{at}.k_rope"] = (_widen(x.transpose(1, 2)) for x in (query, key))
        out_BTHD, weights = attend(module, query, key, value, *args, **kwargs)
        taps[f"{at}.attn"] = _widen(out_BTHD)
        return out_BTHD, weights

    AttentionInterface.register(_PROBE, probe)
    AttentionMaskInterface.register(_PROBE, AttentionMaskInterface()[chosen])
    model.set_attn_implementation(_PROBE)
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


def _widen(x: Tensor) -> np.ndarray:
    """A copy, exactly: numpy has no bfloat16."""
    return x.detach().to("cpu", torch.promote_types(x.dtype, torch.float32), copy=True).numpy()
