"""The roundings that the study of precision emulates, beside transformers' own eager attention, by the one error rule.

Two questions. Is transformers' attention as near to float64 as the oracle under its preset? And is the *difference*
between two shifts, which the study is made of, the emulation's? A model that rounds elsewhere may be as near to
float64; it fails the second.

Legend: L layers · H query heads · K key/value heads · T tokens of a row · D head_dim · R rows.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers.models.llama.modeling_llama as llama

from anchorline.tolerance import judge
from jaxref.model import Decoder
from jaxref.rounding import Rounding, preset
from parity_tests.oracle import oracle_taps, preset_name
from parity_tests.tests.models import oracle_of, tiny_model
from ropestudy.compute.measures import weights
from ropestudy.compute.pieces import probabilities

# So many sums that some lie near the middle of two numbers of bf16, where correct runs part.
WIDE = {"hidden_size": 256, "head_dim": 64}
TOKENS, ROWS, SHIFT = 128, 4, 16
SEEN = np.tril(np.ones((TOKENS, TOKENS), bool))


class Checked(NamedTuple):
    """Error over allowance, up to 1 passes: of attention by layer, of what a shift moves, of D by column."""

    attention_L: list[float]
    shift: float
    columns: float


def rows(count: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(0, 97, TOKENS) for _ in range(count)]


@torch.no_grad()
def torch_attention(model: Any, ids_T: np.ndarray, shift: int) -> np.ndarray:
    """Return transformers' own probabilities, float64 [L, H, T, T]."""
    positions = torch.arange(shift, shift + TOKENS)[None]
    found = model(input_ids=torch.from_numpy(ids_T)[None], position_ids=positions, output_attentions=True)
    return np.array([layer[0].double().numpy() for layer in found.attentions])


def oracle_attention(decoder: Decoder, ids_T: np.ndarray, shift: int, rounding: Rounding) -> np.ndarray:
    """Return the oracle's probabilities of its own forward pass, float64 [L, H, T, T]."""
    batch = {
        "input_ids": torch.from_numpy(ids_T)[None],
        "position_ids": torch.arange(shift, shift + TOKENS)[None],
        "document_ids": torch.ones(1, TOKENS, dtype=torch.int64),
    }
    taps, made = oracle_taps(decoder, batch, rounding), []
    for layer in range(decoder.config.num_hidden_layers):
        q_THD, k_TKD = (taps[f"layers.{layer}.{name}"][0].astype(rounding.dtype) for name in ("q_rope", "k_rope"))
        (T, H, D), K = q_THD.shape, k_TKD.shape[1]
        q_1TKGD = jnp.asarray(q_THD.reshape(1, T, K, H // K, D))
        k_1TKGD = jnp.asarray(np.broadcast_to(k_TKD[None, :, :, None], (1, T, K, H // K, D)))
        found, _ = probabilities(q_1TKGD, k_1TKGD, jnp.asarray(SEEN), rounding, D**-0.5)
        made.append(np.asarray(found, np.float64).reshape(H, T, T))
    return np.array(made)


def check(model: Any) -> Checked:
    decoder, ours = oracle_of(model), preset(preset_name("eager", model.dtype))
    same = ours.replace(carrier="float64")
    attention_RL: list[list[float]] = []
    moved: list[np.ndarray] = []
    columns: list[np.ndarray] = []
    n_T = weights(np.ones(TOKENS, np.int64))
    for ids_T in rows(ROWS):
        theirs = [torch_attention(model, ids_T, shift) for shift in (0, SHIFT)]
        truth = oracle_attention(decoder, ids_T, 0, preset("exact"))
        exact = [oracle_attention(decoder, ids_T, shift, same) for shift in (0, SHIFT)]
        emulated = [oracle_attention(decoder, ids_T, shift, ours) for shift in (0, SHIFT)]
        layers = zip(theirs[0], truth, emulated[0], strict=True)
        attention_RL.append([judge(*(x[:, SEEN] for x in layer), "bfloat16").ratio for layer in layers])
        moved.append(np.array([(a - b)[..., SEEN] for a, b in (theirs, exact, emulated)]))
        columns.append(np.array([n_T * np.abs(a - b).sum((1, 2)) for a, b in (theirs, exact, emulated)]))
    return Checked(
        [max(ratios) for ratios in zip(*attention_RL, strict=True)],
        judge(*np.stack(moved, 1), "bfloat16").ratio,
        max(judge(*one, "bfloat16").ratio for one in columns),
    )


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_eager_bf16_is_the_oracles(family):
    found = check(tiny_model(family, torch.bfloat16, "eager", **WIDE))
    assert max(*found.attention_L, found.shift, found.columns) <= 1


def attention_in_float32(module, query, key, value, *rest, **named):
    out, returned = EAGER(module, query.float(), key.float(), value.float(), *rest, **named)
    return out.to(query.dtype), returned


def rotation_in_float32(q, k, cos, sin, *rest, **named):
    turned = ROTATE(q.float(), k.float(), cos.float(), sin.float(), *rest, **named)
    return tuple(x.to(q.dtype) for x in turned)


EAGER, ROTATE = llama.eager_attention_forward, llama.apply_rotary_pos_emb


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("eager_attention_forward", attention_in_float32), ("apply_rotary_pos_emb", rotation_in_float32)],
)
def test_a_model_that_rounds_elsewhere_is_caught(name, wrong, monkeypatch):
    """It is as near to float64, and passes the first question; shifts move it otherwise."""
    monkeypatch.setattr(llama, name, wrong)
    found = check(tiny_model("llama", torch.bfloat16, "eager", **WIDE))
    assert max(found.attention_L) <= 1 < found.shift
