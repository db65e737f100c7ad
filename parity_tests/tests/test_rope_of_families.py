"""`extend` keeps what a config says of RoPE: every family of transformers, by every type, and published parameters.

Transformers' own modules and the oracle say what the kept keys compute.
"""

import copy
import warnings
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, DeepseekV3Config, Gemma3TextConfig, LlamaConfig, PhimoeConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from anchorline.errors import UserError
from parity_tests import extensions, families
from parity_tests.tests.test_families import PAGE
from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import describe, extend
from torchtrain.tests.tiny import tiny_config, tiny_model


@pytest.mark.sweep
def test_every_family_keeps_what_its_config_says_or_refuses():
    with warnings.catch_warnings(action="ignore"):
        section = extensions.describe(families.causal_families())
    assert section in PAGE.read_text("utf-8"), "run `make families`"


YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 8192}
LISTS = {"short_factor": [1.0 + i / 64 for i in range(64)], "long_factor": [2.0 + i for i in range(64)]}
# Parameters as models publish them.
OWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-oss": (CONFIG_MAPPING["gpt_oss"](), {}),
    "Ministral 3": (CONFIG_MAPPING["ministral3"](), {}),
    "DeepSeek V3": (
        DeepseekV3Config(max_position_embeddings=163_840),
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40, "original_max_position_embeddings": 4096}
        | {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "Llama with betas": (
        LlamaConfig(max_position_embeddings=32_768),
        YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.0, "truncate": False},
    ),
    "Yarn Llama 2": (LlamaConfig(max_position_embeddings=32_768), YARN | {"finetuned": True, "type": "yarn"}),
    "Llama 3.1": (
        LlamaConfig(max_position_embeddings=131_072),
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 8192}
        | {"low_freq_factor": 2.0, "high_freq_factor": 8.0},
    ),
    "Phi 3.5 MoE": (
        PhimoeConfig(max_position_embeddings=131_072),
        {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **LISTS}
        | {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122},
    ),
    "Phi 3": (
        CONFIG_MAPPING["phi3"](max_position_embeddings=131_072, hidden_size=4096, num_attention_heads=32),
        {"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0, **LISTS}
        | {"original_max_position_embeddings": 4096},
    ),
    "Gemma 3": (
        Gemma3TextConfig(),
        {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
        | {"full_attention": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "beta_fast": 20.0}},
    ),
    "Qwen 2.5 VL": (
        CONFIG_MAPPING["qwen2"](),
        {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    ),
}


def published(name: str):
    config, parameters = OWN[name]
    config = copy.deepcopy(config)
    config.rope_parameters = copy.deepcopy(parameters) or config.rope_parameters
    if name == "Gemma 3":
        config.rope_parameters["full_attention"]["original_max_position_embeddings"] = 16_384
    return config


def own_type(config) -> str:
    tables = extensions._tables(config)
    return next(table for kind, table in tables.items() if not extensions._has_window(kind))["rope_type"]


@pytest.mark.parametrize("name", OWN)
def test_published_parameters_stay_by_the_models_own_type(name):
    config = published(name)
    kind = own_type(config)
    assert not extensions.find_fault(config, {"theta": 1e9} if kind == "default" else {"type": kind})


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("settings", [{}, {"type": "own"}, {"type": "own", "theta": "own"}], ids=str)
def test_extending_to_the_length_that_a_model_has_changes_nothing(name, settings):
    config = published(name)
    table = next(t for kind, t in extensions._tables(config).items() if not extensions._has_window(kind))
    own = {"type": table["rope_type"], "theta": float(table["rope_theta"])}
    rope = RopeConfig(**{key: own[key] for key in settings})
    for length in (config.max_position_embeddings, config.max_position_embeddings // 2):
        extended = extend(config, rope, length)
        assert extended.to_dict() == config.to_dict()
        assert describe(extended, config).endswith("; as in its config.json")


@pytest.mark.parametrize("name", [name for name in OWN if "Phi" not in name])
@pytest.mark.parametrize("settings", ["linear", "ntk", "yarn", "longrope"])
def test_published_parameters_stay_by_another_type_where_it_takes_them(name, settings):
    assert not extensions.find_fault(published(name), extensions.SETTINGS[settings])


def test_deepseeks_softmax_scale_stays():
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
    config = tiny_config("deepseek_v3", rope_parameters=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0})
    own = AutoModelForCausalLM.from_config(config).model.layers[0].self_attn.scaling
    assert own == pytest.approx(0.2646, abs=1e-4)
    again = extend(config, RopeConfig(type="yarn"), 64)
    assert AutoModelForCausalLM.from_config(again).model.layers[0].self_attn.scaling == own
    plain = extend(tiny_config("deepseek_v3"), RopeConfig(type="yarn", mscale=1.0, mscale_all_dim=1.0), 256)
    assert AutoModelForCausalLM.from_config(plain).model.layers[0].self_attn.scaling == own


@pytest.mark.parametrize("rope_type", ["linear", "ntk", "dynamic", "yarn", "default"])
def test_ministral_3_runs_however_it_is_extended(rope_type):
    config = families.tiny_config("ministral3")
    config.rope_parameters["original_max_position_embeddings"] = 16
    theta = {"theta": 1e9} if rope_type in ("dynamic", "default") else {}
    extended = extend(config, RopeConfig(type=rope_type, **theta), 4 * config.max_position_embeddings)
    model = AutoModelForCausalLM.from_config(extended)
    ids = families.packed_rows()["input_ids"]
    assert model(ids, use_cache=False).logits.isfinite().all()
    assert extended.rope_parameters["llama_4_scaling_beta"] == 0.1


def test_granites_theta_by_layer_changes_with_theta():
    config = families.tiny_config("granite_swa")
    model = AutoModelForCausalLM.from_config(extend(config, RopeConfig(type="ntk"), 128))
    thetas = {float(rotary.config.rope_parameters["rope_theta"]) for rotary in model.model.rotary_embs}
    assert thetas == {model.config.rope_parameters["rope_theta"]} != {1e4}
    config.layer_rope_theta[0] = 5e5
    with pytest.raises(UserError, match=r"rope\.theta: the model's config\.json sets layer_rope_theta layer by layer"):
        extend(config, RopeConfig(type="ntk"), 128)


def test_an_alpha_that_only_the_own_type_counts_is_not_lost():
    config = CONFIG_MAPPING["hunyuan_v1_dense"](head_dim=128)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0}
    assert extend(config, RopeConfig(theta=1e6), 4096).rope_parameters["alpha"] == 1000.0
    for rope_type in ("ntk", "linear", "yarn", "default"):
        with pytest.raises(UserError, match=f"rope.type {rope_type}: the model's alpha 1000 counts with its own type"):
            extend(config, RopeConfig(type=rope_type), 4096)


def test_the_line_rope_prints_what_changed():
    model = tiny_model("gpt_oss")
    extended = extend(model.config, RopeConfig(type="linear"), 128)
    assert describe(extended, model.config) == (
        "linear, theta 10000, factor 8; changed: rope_type yarn -> linear, factor 4 -> 8, "
        "original_max_position_embeddings 16 -> (none)"
    )
