"""Models and small packed batches for comparing the two sides: tiny random ones of every family.

Legend: B batch · T tokens of a row.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from jaxref.decoder_config import DecoderConfig
from jaxref.layout import lay_out
from jaxref.model import Decoder
from jaxref.storage.weights import from_arrays
from parity_tests.gate.case import FAMILIES
from parity_tests.oracle import to_numpy

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
ANCHOR_TOKENS = 1


def tiny_model(family: str, dtype: torch.dtype, implementation: str = "anchor", seed: int = 0, **changes: Any) -> Any:
    """A random model for causal language modelling, made in float32 and rounded to `dtype` as `from_pretrained` does.

    Weights are larger than a fresh model's, so that attention is far from uniform and a wrong mask or position shows;
    biases and norms are drawn too, so that they count.
    """
    torch.manual_seed(seed)
    windows = {"sliding_window": None} if family == "mistral" else {}
    config = FAMILIES[family](**(SIZES | windows | changes), initializer_range=0.08)
    drawn = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    for name, weight in drawn.named_parameters():
        if name.endswith("bias") or "norm" in name:
            weight.data += 0.1 * torch.randn_like(weight)
    # Built in its dtype: `.to(bfloat16)` would round RoPE's inverse frequencies as well.
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=implementation, trust_remote_code=False
    )
    model.load_state_dict(drawn.state_dict())
    return model.eval()


def packed_batch(
    variant: str, lengths: tuple[int, ...] = (9, 1, 14, 5), vocabulary: int = 97, seed: int = 0
) -> dict[str, Tensor]:
    """Two rows of random tokens under a mask variant, the second with a document less and padding; int64 [2, T]."""
    arrays = _arrays(variant, lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, vocabulary, arrays["document_ids"].shape, generator=generator), **arrays}


def _arrays(variant: str, lengths: tuple[int, ...], seed: int) -> dict[str, Tensor]:
    """position_ids and document_ids of both rows.

    Under +tag each document opens with one token of tag, out of its own length (a one-token document grows by it): what
    a tag changes for the model is where interleaving may cut.
    """
    base, *extras = variant.split("+")
    tag = int("tag" in extras)
    if tag:
        extras.remove("tag")
        lengths = tuple(max(n - tag, 1) for n in lengths)
    name = "+".join([base, *extras])
    rows = [
        lay_out(lengths, name, ANCHOR_TOKENS, tag=tag, seed=seed),
        lay_out(lengths[:-1], name, ANCHOR_TOKENS, padding=lengths[-1] + tag, tag=tag, seed=seed),
    ]
    return {
        "position_ids": torch.from_numpy(np.stack([row.position_ids for row in rows])),
        "document_ids": torch.from_numpy(np.stack([row.document_ids for row in rows])),
    }


def oracle_of(model: Any) -> Decoder:
    """Build the oracle's decoder on the weights of a transformers model, as they are rounded there."""
    arrays = {name: to_numpy(x) for name, x in model.state_dict().items()}
    return from_arrays(DecoderConfig.from_hf(model.config.to_dict()), arrays)
