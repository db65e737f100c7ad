"""What a config.json becomes, and what is refused."""

from dataclasses import replace

import pytest

from jaxref.decoder_config import DecoderConfig
from jaxref.rope import inverse_frequencies
from jaxref.rope_spec import RopeSpec
from jaxref.tests.decoders import FAMILIES, WINDOWED, hf_config


def test_the_families_differ_in_biases_and_norms():
    switches = {
        family: (config.qkv_bias, config.o_bias, config.qk_norm)
        for family in FAMILIES
        for config in [DecoderConfig.from_hf(hf_config(family))]
    }
    assert switches == {
        "llama": (False, False, False),
        "mistral": (False, False, False),
        "qwen2": (True, False, False),
        "qwen3": (False, False, True),
    }
    for family, biases in (("llama", (True, True)), ("qwen3", (True, True)), ("mistral", (False, False))):
        config = DecoderConfig.from_hf(hf_config(family, attention_bias=True))
        assert (config.qkv_bias, config.o_bias) == biases


@pytest.mark.parametrize(
    ("family", "changes"),
    [*((family, {}) for family in FAMILIES), ("mistral", {"sliding_window": 5}), ("qwen3", WINDOWED)],
)
def test_to_hf_reads_back_the_same(family, changes):
    config = DecoderConfig.from_hf(hf_config(family, **changes))
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_to_hf_refuses_what_a_config_json_cannot_say():
    config = DecoderConfig.from_hf(hf_config("qwen2", **WINDOWED))
    for changes in ({"softcap": 2.0}, {"sinks": True}, {"keep_anchor": True}, {"scale": 0.3}, {"windows": (3, 4)}):
        with pytest.raises(ValueError, match=rf"{next(iter(changes))}: .* is in no config.json of qwen2"):
            replace(config, **changes).to_hf()
    with pytest.raises(ValueError, match="rope: qwen2 rotates whole heads, not 4 dimensions"):
        replace(config, rope=RopeSpec(4, 1e4)).to_hf()


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [1.0, 4.0]}
SCALED = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5},
    {**LONGROPE, "factor": 4.0, "original_max_position_embeddings": 16},
    {**LONGROPE, "factor": 8.0, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: f"{rope['rope_type']} {rope['factor']:g}")
def test_to_hf_says_rope_to_transformers_4_too(rope):
    """Which knows `rope_theta` and `rope_scaling` alone, and for longrope derives the factor from two lengths beside
    it.
    """
    fields = hf_config("llama", head_dim=4, max_position_embeddings=64)
    config = DecoderConfig.from_hf(fields | {"rope_parameters": {"rope_theta": 5e4, **rope}})
    written = config.to_hf()
    del written["rope_parameters"]
    scaling = written["rope_scaling"]
    assert "rope_theta" not in scaling
    if rope["rope_type"] == "longrope":
        scaling["factor"] = written["max_position_embeddings"] / written["original_max_position_embeddings"]
    read = DecoderConfig.from_hf(written)
    assert read.rope.theta == 5e4
    for seq_len in (1, 64):
        (ours, factor), (theirs, other) = (inverse_frequencies(spec, seq_len) for spec in (config.rope, read.rope))
        assert ours.tolist() == theirs.tolist()
        assert factor == other


def test_to_hf_says_that_nothing_is_scaled():
    written = DecoderConfig.from_hf(hf_config("llama")).to_hf()
    assert (written["rope_theta"], written["rope_scaling"]) == (10000.0, None)


@pytest.mark.parametrize(("family", "head_dim"), [("llama", 3), ("mistral", 3), ("qwen2", 3), ("qwen3", 128)])
def test_an_absent_head_dim(family, head_dim):
    fields = hf_config(family, hidden_size=24, num_attention_heads=8 if head_dim == 3 else 4)
    del fields["head_dim"]
    if head_dim == 128:
        assert DecoderConfig.from_hf(fields).head_dim == 128
    else:
        with pytest.raises(ValueError, match=r"head_dim: 3 is odd"):
            DecoderConfig.from_hf(fields)
        assert DecoderConfig.from_hf(fields | {"num_attention_heads": 4}).head_dim == 6


def test_absent_key_value_heads_are_the_heads_only_where_transformers_says_so():
    fields = hf_config("llama")
    del fields["num_key_value_heads"]
    assert DecoderConfig.from_hf(fields).num_key_value_heads == 4
    with pytest.raises(ValueError, match=r"num_key_value_heads: missing"):
        DecoderConfig.from_hf(fields | {"model_type": "mistral"})


def test_the_windows_of_layers():
    absent = hf_config("mistral")
    del absent["sliding_window"]  # 4096 in transformers
    last = {"sliding_window": 63, "use_sliding_window": True, "max_window_layers": 1}
    for fields, windows in (
        (absent, (4096, 4096)),
        (hf_config("llama", sliding_window=63), (None, None)),
        (hf_config("mistral", sliding_window=63), (63, 63)),
        (hf_config("qwen2", sliding_window=63, use_sliding_window=True), (None, None)),  # of 28 layers and more
        (hf_config("qwen2", **last), (None, 63)),
        (hf_config("qwen2", **last | {"use_sliding_window": False}), (None, None)),
        (hf_config("qwen3", **WINDOWED), (3, None)),
    ):
        assert DecoderConfig.from_hf(fields).windows == windows


def test_what_attends_under_the_rule_alone_refuses_more():
    DecoderConfig.from_hf(hf_config("mistral", sliding_window=64)).check_plain()
    for config in (
        DecoderConfig.from_hf(hf_config("mistral", sliding_window=63)),
        replace(DecoderConfig.from_hf(hf_config("llama")), sinks=True),
        replace(DecoderConfig.from_hf(hf_config("llama")), scale=0.3),
    ):
        with pytest.raises(ValueError, match=r"set it to null|(sinks|scale): this does not compute it"):
            config.check_plain()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2' is not implemented; known are llama, mistral, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented; known is 'silu'"),
        ({"mlp_bias": True}, "mlp_bias: True is not implemented"),
        ({"partial_rotary_factor": 0.7}, "partial_rotary_factor: llama rotates whole heads"),  # 4 dimensions of 6
        ({"attention_dropout": 0.1}, "attention_dropout: 0.1 is not implemented"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: .* is not implemented"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types: .* 2 from full_attention"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide num_attention_heads 4"),
        ({"vocab_size": 0}, "vocab_size: 0 is not a positive whole number"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers: '2' is not a positive whole number"),
        ({"intermediate_size": None}, "intermediate_size: missing"),
        ({"rms_norm_eps": 0}, "rms_norm_eps: 0 is not a number between 0 and 1"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is not true or false"),
        ({"head_dim": None, "hidden_size": 13}, "hidden_size: 13 is not a multiple of num_attention_heads 4"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(hf_config("llama", **changes))
