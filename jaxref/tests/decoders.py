"""Tiny decoders and batches for the tests: every parameter random, biases and norms included, so that none is inert."""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder
from jaxref.storage.weights import from_arrays, parameter_shapes

UNIT_RATIO = 2.0**-29  # unit roundoff of float64 (2^-53) over that of float32 (2^-24)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

# Token ids are all different, so the gradient of an embedding row is the gradient of one token. 0: anchor, -1: padding.
TOKENS = 12
WINDOWED = {"use_sliding_window": True, "sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
VARIANTS = {
    "full": ([1] * 12, range(12)),
    "intra": ([1] * 5 + [2] * 4 + [3] * 3, range(12)),
    "intra_reset": ([1] * 5 + [2] * 4 + [3] * 3, [*range(5), *range(4), *range(3)]),
    "anchor": ([0] + [1] * 4 + [2] * 4 + [3] * 3, range(12)),
    "anchor_prefix_padded": ([0, 0] + [1] * 3 + [2] * 4 + [-1] * 3, range(12)),
    "interleave": ([0] + [1] * 6 + [2] * 5, [0, 1, 2, 6, 7, 10, 11, 3, 4, 5, 8, 9]),
}


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    """A config.json with grouped heads and a head_dim that is not hidden_size / heads."""
    return {
        "model_type": family,
        "vocab_size": 29,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        **changes,
    }


def random_arrays(config: DecoderConfig, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Parameters of a size that makes attention uneven and keeps activations near 1."""
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(loc=len(shape) == 1, scale=0.3, size=shape).astype(dtype)
        for name, shape in parameter_shapes(config).items()
    }


def tiny(family: str, dtype: Any = np.float32, added: dict[str, Any] | None = None, **changes: Any) -> Decoder:
    """A decoder of random arrays. `added`: fields of its config that no config.json of its family has."""
    config = replace(DecoderConfig.from_hf(hf_config(family, **changes)), **added or {})
    return from_arrays(config, random_arrays(config, dtype))


def row(variant: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(input_ids, position_ids, document_ids), each [1, 12]."""
    documents, positions = VARIANTS[variant]
    ids = np.random.default_rng(1).permutation(29)[:TOKENS]
    return ids[None], np.array(positions)[None], np.array(documents)[None]


def batch(variant: str) -> dict[str, np.ndarray]:
    """The row as a trainer's batch: targets inside documents only, one domain per parity of the document id."""
    ids, positions, documents = row(variant)
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
    labels = np.full_like(ids, -100)
    labels[:, :-1] = np.where(same, ids[:, 1:], -100)
    return {
        "input_ids": ids,
        "position_ids": positions,
        "document_ids": documents,
        "shift_labels": labels,
        "domain_ids": np.where(documents > 0, documents % 2, -1),
    }


def assert_float64_of(got64, got32, truth) -> None:
    """Errors of one computation scale with the unit roundoff, so float32's own error, scaled, bounds float64's.

    The factor 2 and one rounding of the truth's own size are the project's rule for any candidate.
    """
    got64, got32, truth = np.asarray(got64), np.asarray(got32), np.asarray(truth)
    np.testing.assert_array_equal(np.isinf(got64), np.isinf(truth))
    got64, got32, truth = (x[np.isfinite(truth)] for x in (got64, got32, truth))
    error64, error32 = np.abs(got64 - truth).max(), np.abs(got32 - truth).max()
    assert error32 > 0
    assert error64 <= 2 * error32 * UNIT_RATIO + 2.0**-53 * np.abs(truth).max()
