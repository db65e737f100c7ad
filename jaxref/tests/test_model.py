"""The decoder against a twin in numpy loops, its roundings site by site, and its isolation by gradients."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxref.model import Decoder, _run_layer, to_arrays
from jaxref.rope_spec import RopeSpec
from jaxref.rounding import preset
from jaxref.tests.decoders import FAMILIES, TOKENS, VARIANTS, WINDOWED, assert_float64_of, row, tiny

EXACT, FP32, HF_BF16 = preset("exact"), preset("fp32"), preset("hf_eager_bf16")


def visible(documents: np.ndarray, q: int, k: int) -> bool:
    return bool(k <= q and documents[q] != -1 and documents[k] != -1 and documents[k] in (documents[q], 0))


def numpy_parameters(decoder: Decoder) -> dict[str, np.ndarray]:
    return {name: np.asarray(array).astype(np.longdouble) for name, array in to_arrays(decoder).items()}


def numpy_norm(x, weight, eps) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + np.longdouble(eps)) * weight


def numpy_layer(config, p, number: int, x, positions, documents) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A layer in loops over tokens and heads, rotating pairs as complex numbers.

    Returns its output [T, M], its probabilities and its scaled logits [H, T, T], 0 where nothing is seen.
    """
    T, H, D, layer = len(x), config.num_attention_heads, config.head_dim, f"model.layers.{number}."
    R = config.rope.head_dim
    frequency = np.longdouble(config.rope.theta) ** (-np.arange(0, R, 2) / np.longdouble(R))
    scale = 1 / np.sqrt(np.longdouble(D)) if config.scale is None else np.longdouble(config.scale)

    def norm(x, name):
        return numpy_norm(x, p[layer + name + ".weight"], config.rms_norm_eps)

    def linear(x, name):
        return x @ p[layer + name + ".weight"].T + p.get(layer + name + ".bias", 0)

    def heads(x, name):
        x = linear(x, f"self_attn.{name}_proj").reshape(T, -1, D)
        if f"{layer}self_attn.{name}_norm.weight" in p:
            x = norm(x, f"self_attn.{name}_norm")
        turned = (x[..., : R // 2] + 1j * x[..., R // 2 : R]) * np.exp(1j * positions[:, None, None] * frequency)
        return np.concatenate([turned, x[..., R:]], axis=-1)

    h = norm(x, "input_layernorm")
    q, k, v = heads(h, "q"), heads(h, "k"), linear(h, "self_attn.v_proj").reshape(T, -1, D)
    probs, logits = np.zeros((2, H, T, T), np.longdouble)
    out = np.zeros((T, H, D), np.longdouble)
    for t in range(T):
        seen = [s for s in range(T) if visible(documents, t, s)]
        if (window := config.windows[number]) is not None:
            kept = [s for s in seen[:-window] if documents[s] == 0] if config.keep_anchor else []
            seen = kept + seen[-window:]
        for head in range(H if seen else 0):
            kv = head * config.num_key_value_heads // H
            scores = (q[t, head] * k[seen, kv].conj()).real.sum(-1) * scale
            if config.softcap is not None:
                scores = config.softcap * np.tanh(scores / config.softcap)
            weights = np.exp(scores)
            sink = np.exp(p[f"{layer}self_attn.sinks"][head]) if config.sinks else 0
            probs[head, t, seen], logits[head, t, seen] = weights / (weights.sum() + sink), scores
            out[t, head] = probs[head, t, seen] @ v[seen, kv]
    x = x + linear(out.reshape(T, -1), "self_attn.o_proj")
    h = norm(x, "post_attention_layernorm")
    gate = linear(h, "mlp.gate_proj")
    return x + linear(gate / (1 + np.exp(-gate)) * linear(h, "mlp.up_proj"), "mlp.down_proj"), probs, logits


def numpy_logits(decoder: Decoder, ids, positions, documents) -> np.ndarray:
    """The same model in loops."""
    config, p = decoder.config, numpy_parameters(decoder)
    x = p["model.embed_tokens.weight"][ids]
    for number in range(config.num_hidden_layers):
        x, _, _ = numpy_layer(config, p, number, x, positions, documents)
    head = p["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return numpy_norm(x, p["model.norm.weight"], config.rms_norm_eps) @ head.T


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 3, "added": {"softcap": 1.5}}),
        ("qwen2", WINDOWED | {"added": {"sinks": True, "keep_anchor": True}}),
        ("llama", {"added": {"scale": 0.3, "rope": RopeSpec(4, 1e4)}}),  # 4 dimensions of 6 rotate
    ],
)
def test_exact_is_the_model_written_in_loops(family, changes):
    decoder, arguments = tiny(family, **changes), row("anchor_prefix_padded")
    truth = numpy_logits(decoder, *(array[0] for array in arguments))
    assert_float64_of(decoder(*arguments, EXACT)[0], decoder(*arguments, FP32)[0], truth)


@pytest.mark.parametrize("family", FAMILIES)
def test_taps_have_their_names_and_shapes_and_change_nothing(family):
    decoder, arguments = tiny(family), row("anchor")
    logits, taps = decoder(*arguments, HF_BF16, taps=True)
    by_head = {"q": 4, "k": 2, "v": 2, "q_rope": 4, "k_rope": 2, "attn": 4}
    by_head |= {"q_norm": 4, "k_norm": 2} if family == "qwen3" else {}
    wide = ("input_norm", "attn_out", "attn_residual", "post_norm", "mlp", "residual")
    layer = {name: (1, TOKENS, heads, 6) for name, heads in by_head.items()} | {"lse": (1, 4, TOKENS)}
    layer |= dict.fromkeys(wide, (1, TOKENS, 12))
    expected = {f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    expected |= {
        "rope_table": (1, TOKENS, 6),
        "embed": (1, TOKENS, 12),
        "final_norm": (1, TOKENS, 12),
        "logits": (1, TOKENS, 29),
    }
    assert {name: tap.shape for name, tap in taps.items()} == expected
    assert {tap.dtype for tap in taps.values()} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(logits, taps["logits"])
    np.testing.assert_array_equal(logits, decoder(*arguments, HF_BF16))
    np.testing.assert_array_equal(taps["final_norm"], decoder.hidden(*arguments, HF_BF16))


def is_bf16(array) -> bool:
    return bool((jax.lax.reduce_precision(array, 8, 7) == array).all())


@pytest.mark.parametrize(
    ("site", "rounded"),
    [
        ("embed", {"embed"}),
        ("norm", {"input_norm", "post_norm", "q_norm", "k_norm", "final_norm"}),
        ("proj", {"q", "k", "v", "attn_out"}),
        ("mlp", {"mlp"}),
        ("residual", {"attn_residual", "residual"}),
        ("logits", {"logits"}),
        ("table", {"rope_table"}),
    ],
)
def test_a_site_rounds_its_own_taps_and_no_others(site, rounded):
    rounding = replace(EXACT, **{site: "bf16"})
    _, taps = tiny("qwen3")(*row("full"), rounding, taps=True)
    assert {name.split(".")[-1] for name, tap in taps.items() if is_bf16(tap)} == rounded


def test_hf_eager_bf16_leaves_nothing_but_the_lse_unrounded():
    _, taps = tiny("qwen3")(*row("full"), HF_BF16, taps=True)
    assert {name.split(".")[-1] for name, tap in taps.items() if not is_bf16(tap)} == {"lse"}


def test_mlp_rounds_gate_up_activation_and_product_too():
    mlp, x = tiny("llama").layers[0].mlp, jnp.asarray(np.random.default_rng(2).normal(size=(1, 3, 12)))
    r = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    w = {name: getattr(mlp, name + "_proj").weight[...].astype(jnp.float64) for name in ("gate", "up", "down")}
    gate, up = r(x @ w["gate"].T), r(x @ w["up"].T)
    expected = r(r(r(gate / (1 + jnp.exp(-gate))) * up) @ w["down"].T)
    np.testing.assert_array_equal(mlp(x, replace(EXACT, mlp="bf16")), expected)


def test_norm_rounds_before_and_after_the_weight():
    norm, x = tiny("llama").norm, jnp.asarray(np.random.default_rng(3).normal(size=(1, 5, 12)))
    r = partial(jax.lax.reduce_precision, exponent_bits=8, mantissa_bits=7)
    quotient = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    weight = norm.weight[...].astype(jnp.float64)
    got = norm(x, replace(EXACT, norm="bf16"))
    np.testing.assert_array_equal(got, r(weight * r(quotient)))
    assert (got != r(weight * quotient)).any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_gradient_from_what_is_invisible(family, variant):
    decoder, (ids, positions, documents) = tiny(family), row(variant)
    logits, pull = jax.vjp(lambda decoder: decoder(ids, positions, documents, EXACT), decoder)
    for token in range(TOKENS):
        direction = jnp.zeros_like(logits).at[0, token].set(np.random.default_rng(4).normal(size=29))
        rows = np.asarray(pull(direction)[0].embed_tokens.weight[...])[ids[0]]
        reached = {k for k in range(TOKENS) if (rows[k] != 0).any()}
        # A token always reaches its own output, by the residual stream; padding has nothing else.
        assert reached == {token} | {k for k in range(TOKENS) if visible(documents[0], token, k)}


def compare_compiled_and_plain():
    decoder, rounding = tiny("llama", num_hidden_layers=1), replace(HF_BF16, carrier="float64")
    _, compiled = decoder(*row("anchor"), rounding, taps=True)
    with jax.disable_jit():
        _, plain = decoder(*row("anchor"), rounding, taps=True)
    for name in compiled:
        if not name.endswith("lse"):  # the one tap that is not rounded
            np.testing.assert_array_equal(compiled[name], plain[name], err_msg=name)


@pytest.mark.parametrize("flags", ["the tests' own", pytest.param("XLA's own", marks=pytest.mark.sweep)])
def test_the_compiler_drops_no_rounding(flags):
    """Op by op or compiled, every rounded tap is the same: float64 leaves no chance of two results astride a bfloat16
    tie. With the quick compiler of the tests (conftest.py), and as users have it.
    """
    if flags == "the tests' own":
        compare_compiled_and_plain()
        return
    code = f"from {__name__} import compare_compiled_and_plain; compare_compiled_and_plain()"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_one_layer_is_compiled_for_each_window():
    kinds = ["sliding_attention", "full_attention"] * 3
    changes = WINDOWED | {"layer_types": kinds, "num_hidden_layers": 6, "hidden_size": 14}
    decoder, arguments = tiny("qwen2", **changes), row("full")
    before = _run_layer._cache_size()
    decoder(*arguments, EXACT)
    assert _run_layer._cache_size() == before + 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda i, p, d: (i + 29, p, d), "input_ids: .* leave the vocabulary 0..28"),
        (lambda i, p, d: (i, p[:, 1:], d), r"position_ids: shape \(1, 11\)"),
        (lambda i, p, d: (i[0], p[0], d[0]), r"input_ids: shape \(12,\)"),
        (lambda i, p, d: (i, p * 1.0, d), "position_ids: dtype float64 is not an integer"),
        (lambda i, p, d: (i, p, d - 9), "document_ids: -8; known are"),
    ],
)
def test_bad_input_is_one_clear_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        tiny("llama")(*wrong(*row("full")), EXACT)


def test_parameters_that_the_carrier_cannot_hold_are_refused():
    with pytest.raises(ValueError, match=r"carrier: float32 cannot hold float64 parameters exactly"):
        tiny("llama", np.float64)(*row("full"), FP32)
