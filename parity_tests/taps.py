"""Named intermediates ("taps") of a transformers decoder, under the oracle's names: `parity_tests.record` reads them.

The names are those of `jaxref.model`: `embed`, `layers.3.k_rope`, `final_norm`, `logits`, ... so that the two sides
compare key by key. The map `comparing/maps/hf.yaml` says which module's output is which.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · M model width.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from parity_tests.comparing.dumps import Array, Dump
from parity_tests.comparing.names import load_names, rename
from parity_tests.oracle import widen
from parity_tests.record import watch

Taps = dict[str, np.ndarray]

_PROBE = "parity_probe"


@torch.no_grad()
def capture_taps(model: nn.Module, **inputs: Any) -> Taps:
    """Run `model(**inputs)` once; return every tap, in float32 at least, heads apart: [B, T, H, D] and [B, T, M].

    model: for causal language modelling, of a family whose modules have Llama's names, on any device, in any dtype.
    inputs: what the model's forward takes (`input_ids`, `position_ids`, `document_ids`, `plan`, ...).
    """
    found: Taps = {}
    with watch(model, lambda name, x: found.update({name: widen(x)})), _probe_attention(model, found):
        logits = model(**inputs, use_cache=False).logits
    # Each table is there twice, for both of a pair.
    tables = [found.pop(name, None) for name in ("model.rotary_emb", "model.rotary_emb.1")]
    names = load_names("hf")
    arrays = {name: [Array("float32", lambda x=x: x)] for name, x in found.items()}
    config = model.config.to_dict() | {"head_dim": model.model.layers[0].self_attn.head_dim}  # type: ignore[union-attr, operator, index]
    taps = {name: ranks[0].load() for name, ranks in rename(Dump("", arrays, config), names).arrays.items()}
    not_taken = re.compile(r"model\.|lm_head|.*\.(gate|up)$")  # of an MLP the oracle has the output alone
    taken = {name: x for name, x in taps.items() if not not_taken.match(name)}
    table = np.concatenate([x[..., : x.shape[-1] // 2] for x in tables if x is not None], axis=-1)
    return taken | {"rope_table": table, "logits": widen(logits)}


@contextmanager
def _probe_attention(model: Any, taps: Taps) -> Iterator[None]:
    """Put a reader around the model's attention function: rotated q and k go in, the heads' output comes out."""
    chosen = model.config._attn_implementation
    attend: Callable[..., tuple[Tensor, Any]] = ALL_ATTENTION_FUNCTIONS[chosen]

    def probe(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        at = f"layers.{module.layer_idx}"
        taps[f"{at}.q_rope"], taps[f"{at}.k_rope"] = (widen(x.transpose(1, 2)) for x in (query, key))
        out_BTHD, weights = attend(module, query, key, value, *args, **kwargs)
        taps[f"{at}.attn"] = widen(out_BTHD)
        return out_BTHD, weights

    AttentionInterface.register(_PROBE, probe)
    AttentionMaskInterface.register(_PROBE, AttentionMaskInterface()[chosen])
    model.set_attn_implementation(_PROBE)
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)
