"""Tiny random models of every family, and small packed batches, for comparing the two sides.

Legend: B batch · T tokens of a row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from jaxref.mask import layout

FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


def tiny_model(family: str, dtype: torch.dtype, implementation: str = "anchor", seed: int = 0, **changes: Any) -> Any:
    """A random model for causal language modelling, made in float32 and rounded to `dtype` as `from_pretrained` does.

    Initial weights are scaled up so that attention is far from uniform and a wrong mask or position moves the output.
    """
    torch.manual_seed(seed)
    windows = {"sliding_window": None} if family == "mistral" else {}
    config = FAMILIES[family](**(SIZES | windows | changes), initializer_range=0.08)
    drawn = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, weight in drawn.named_parameters():
        if name.endswith("bias") or "norm" in name:  # zeros and ones in a fresh model: draw them, so that they count
            weight.data += 0.1 * torch.randn_like(weight)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    model.load_state_dict(drawn.state_dict())
    return model.eval()


def packed_batch(variant: str, lengths: tuple[int, ...] = (9, 1, 14, 5), vocabulary: int = 97, seed: int = 0) -> dict:
    """Two rows of documents under a mask variant, the second with fewer documents and padding; int64 [2, T]."""
    extras = variant.split("+")
    base = variant.replace("+tag", "")  # a tag is tokens like any other: it moves no mask
    anchor = 1
    rows = [
        layout(lengths, base, anchor=anchor, seed=seed),
        layout(lengths[:-1], base, anchor=anchor, padding=lengths[-1]),
    ]
    assert extras
    generator = torch.Generator().manual_seed(seed)
    T = anchor + sum(lengths)
    return {
        "input_ids": torch.randint(0, vocabulary, (2, T), generator=generator),
        "position_ids": _stack([row.position_ids for row in rows]),
        "document_ids": _stack([row.document_ids for row in rows]),
    }


def _stack(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack([np.asarray(row, dtype=np.int64).reshape(-1) for row in rows]))
