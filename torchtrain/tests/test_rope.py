"""RoPE's frequencies on the model that is really built, against formulas in float64, and what is refused."""

import copy
import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from anchorline.errors import UserError
from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import check_resets, extend, warn_of_stretch
from torchtrain.modeling.save import reader_notes
from torchtrain.modeling.source import open_config
from torchtrain.tests.tiny import POSITIONS, SIZES, refused, tiny_config

# float32 rounds once an operation. base ** e: e and then e * ln(base) carry a relative error into the exponent, so the
# power errs by |e ln base| roundings more; 16 covers all other operations of any type (yarn's blend has the most, 9).
EPS = torch.finfo(torch.float32).eps
D = 8
LENGTH = 4 * POSITIONS


def default(base: float) -> torch.Tensor:
    return torch.tensor([base ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)


def yarn(base: float, factor: float, fast: float = 32, slow: float = 1) -> torch.Tensor:
    """arXiv 2309.00071, section 3.2, with the ramp's ends rounded outwards as its code does."""
    low, high = (D * math.log(POSITIONS / (beta * 2 * math.pi)) / (2 * math.log(base)) for beta in (fast, slow))
    low, high = max(math.floor(low), 0), min(math.ceil(high), D - 1)
    ramp = torch.tensor([min(max((i - low) / (high - low), 0), 1) for i in range(D // 2)], dtype=torch.float64)
    return default(base) * ((1 - ramp) + ramp / factor)


def llama3(base: float, factor: float, low: float, high: float) -> torch.Tensor:
    """Llama 3.1's reference code: long waves are stretched, short ones kept, between them a blend."""
    turns = default(base) * POSITIONS / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return default(base) * (kept + (1 - kept) / factor)


def longrope(base: float, factors: list[float]) -> torch.Tensor:
    return default(base) / torch.tensor(factors, dtype=torch.float64)


LISTS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 2.0, 4.0, 8.0]}
CASES = {
    "keep, theta": ({"theta": 5e5}, default(5e5), 1.0),
    "default": ({"type": "default", "theta": 5e5}, default(5e5), 1.0),
    "linear": ({"type": "linear"}, default(1e4) / 4, 1.0),
    "linear, factor": ({"type": "linear", "factor": 8.0, "theta": 5e5}, default(5e5) / 8, 1.0),
    "ntk": ({"type": "ntk"}, default(1e4 * 4 ** (D / (D - 2))), 1.0),
    "dynamic": ({"type": "dynamic", "factor": 2.0, "theta": 5e5}, default(5e5), 1.0),
    "yarn": ({"type": "yarn"}, yarn(1e4, 4), 0.1 * math.log(4) + 1),
    "yarn, all": (
        {"type": "yarn", "beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.25},
        yarn(1e4, 4, 8, 2),
        1.25,
    ),
    "llama3": ({"type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}, llama3(1e4, 4, 1, 4), 1.0),
    "longrope": (
        {"type": "longrope", **LISTS},
        longrope(1e4, LISTS["long_factor"]),
        math.sqrt(1 + math.log(4) / math.log(POSITIONS)),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_of_the_model_that_is_built(name, dtype):
    settings, expected, attention_scaling = CASES[name]
    config = extend(
        tiny_config("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        RopeConfig(**settings),
        LENGTH,
    )
    rotary = AutoModelForCausalLM.from_config(config, dtype=dtype).model.rotary_emb
    rotary(torch.zeros(1, dtype=dtype), torch.arange(LENGTH)[None])  # longrope and dynamic choose when they are called
    assert rotary.inv_freq.dtype == torch.float32
    base = config.rope_parameters["rope_theta"]
    exponents = torch.arange(0, D, 2) / D
    bound = expected.abs() * EPS * (16 + exponents * math.log(base))
    assert ((rotary.inv_freq.double() - expected).abs() <= bound).all()
    assert rotary.attention_scaling == pytest.approx(attention_scaling, rel=EPS)
    assert config.max_position_embeddings == LENGTH


TYPES = {settings.get("type", "keep"): settings for settings, _, _ in CASES.values() if "factor" not in settings}
TYPES["dynamic"] = {"type": "dynamic"}


@pytest.mark.parametrize("second", ["linear", "ntk", "yarn", "llama3", "longrope"])
@pytest.mark.parametrize("first", ["linear", "yarn", "llama3", "longrope"])
def test_a_second_extension_counts_from_the_original_length(first, second):
    once = extend(tiny_config(), RopeConfig(**TYPES[first]), 2 * POSITIONS)
    twice = extend(once, RopeConfig(**TYPES[second]), 6 * POSITIONS)
    # Both take it, so it stays.
    stays = {"attention_factor": 1.25} if (first, second) == ("yarn", "longrope") else {}
    assert twice.to_dict() == extend(tiny_config(), RopeConfig(**TYPES[second], **stays), 6 * POSITIONS).to_dict()


def linear_config(**changes):
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    return tiny_config(rope_parameters=rope, **changes)


@pytest.mark.parametrize("settings", [{"type": "yarn"}, {"type": "linear"}, {"theta": 5e5}, {}], ids=str)
def test_a_linear_model_from_elsewhere_must_say_what_its_length_is(settings):
    with pytest.raises(
        UserError, match=r"rope\.original_max_.*missing; .*factor 2, .*give 32 if it holds 64 .*64 if .* 128"
    ):
        extend(linear_config(), RopeConfig(**settings), LENGTH)


@pytest.mark.parametrize(("original", "factor"), [(POSITIONS, 4), (POSITIONS // 2, 8)])
def test_a_linear_model_counts_from_the_length_that_was_given(original, factor):
    rope = RopeConfig(type="yarn", original_max_position_embeddings=original)
    parameters = extend(linear_config(), rope, LENGTH).rope_parameters
    assert (parameters["factor"], parameters["original_max_position_embeddings"]) == (factor, original)


def test_a_linear_model_whose_length_is_the_unscaled_one_holds_more():
    keep = RopeConfig(original_max_position_embeddings=POSITIONS)
    kept = extend(linear_config(), keep, 2 * POSITIONS)
    assert kept.max_position_embeddings == 2 * POSITIONS
    assert extend(kept, RopeConfig(), 2 * POSITIONS).to_dict() == kept.to_dict()  # and asks no second time
    assert extend(kept, RopeConfig(type="linear"), LENGTH).rope_parameters["factor"] == 4
    with pytest.raises(UserError, match="the model holds 128 positions"):
        extend(linear_config(), keep, 3 * POSITIONS)
    with pytest.raises(UserError, match="the model holds 64 positions"):
        extend(linear_config(), RopeConfig(original_max_position_embeddings=POSITIONS // 2), 2 * POSITIONS)


def test_a_factor_larger_than_needed_does_not_move_the_length_it_counts_from():
    once = extend(tiny_config(), RopeConfig(type="linear", factor=8.0), 2 * POSITIONS)
    assert extend(once, RopeConfig(type="yarn"), LENGTH).rope_parameters["factor"] == 4


@pytest.mark.parametrize(
    ("config", "answer", "began"),
    [(linear_config(), 48, "32 or 64"), (tiny_config(), 32, "64")],
    ids=["linear", "default"],
)
def test_an_original_length_that_cannot_be_is_refused(config, answer, began):
    rope = RopeConfig(type="yarn", original_max_position_embeddings=answer)
    with pytest.raises(UserError, match=rf"original_max_position_embeddings {answer}: .* began with {began} positions"):
        extend(config, rope, LENGTH)


def phi3(**changes):
    from transformers import Phi3Config

    return Phi3Config(**(SIZES | changes))


def test_a_type_that_the_family_reads_back_as_another_is_refused():
    with pytest.raises(UserError, match=r"rope\.type yarn: phi3 does not read it back"):
        extend(phi3(), RopeConfig(type="yarn"), LENGTH)


def test_a_family_with_a_field_for_the_original_length_gets_the_right_one():
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = extend(phi3(original_max_position_embeddings=4096), RopeConfig(type="longrope", **lists), LENGTH)
    config.standardize_rope_params()  # as the model does when it is built
    assert config.rope_parameters["original_max_position_embeddings"] == POSITIONS


def test_what_stretched_the_model_does_not_count_once_it_is_replaced():
    scaled = extend(tiny_config(), RopeConfig(type="yarn"), LENGTH)
    assert extend(scaled, RopeConfig(type="yarn", factor=2.0), 2 * POSITIONS).max_position_embeddings == 2 * POSITIONS
    with pytest.raises(UserError, match=f"sequence_length {LENGTH}: the model holds {POSITIONS} "):
        extend(scaled, RopeConfig(type="default"), LENGTH)


def test_shorter_rows_do_not_shorten_the_model():
    assert extend(tiny_config(), RopeConfig(theta=5e5), POSITIONS // 2).max_position_embeddings == POSITIONS


@pytest.mark.parametrize(
    "settings",
    [{}, {"theta": 1.5}, {"type": "default"}, {"type": "default", "theta": 1.5}, {"type": "dynamic"}],
    ids=str,
)
def test_a_length_that_nothing_is_done_for_is_refused(settings):
    with pytest.raises(UserError, match=r"sequence_length 65: the model holds 64 .*rope\.theta.*rope\.type"):
        extend(tiny_config(), RopeConfig(**settings), POSITIONS + 1)


@pytest.mark.parametrize("factor", [1.0, 3.9])
@pytest.mark.parametrize("rope_type", ["linear", "ntk", "yarn", "llama3", "longrope"])
def test_a_factor_that_does_not_reach_the_length_is_refused(rope_type, factor):
    with pytest.raises(UserError, match=rf"rope\.factor {factor:g}: .* the 64 .* below .* 256; give at least 4"):
        extend(tiny_config(), RopeConfig(**TYPES[rope_type], factor=factor), LENGTH)


def test_longrope_needs_positions_that_run_through_the_row():
    longrope = RopeConfig(**TYPES["longrope"])
    with pytest.raises(UserError, match=r"intra_reset: longrope .*another variant"):
        check_resets(extend(tiny_config(), longrope, LENGTH), LENGTH, "intra_reset")
    check_resets(extend(tiny_config(), longrope, POSITIONS), POSITIONS, "intra_reset")  # always the short factors
    check_resets(extend(tiny_config(), RopeConfig(type="yarn"), LENGTH), LENGTH, "intra_reset")


def test_longrope_lists_must_have_half_a_heads_length():
    rope = RopeConfig(type="longrope", short_factor=[1.0], long_factor=[1.0] * 4)
    with pytest.raises(UserError, match=r"rope\.short_factor: 1 numbers; .* give 4"):
        extend(tiny_config(), rope, LENGTH)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "llama3", "high_freq_factor": 4.0}, "rope.low_freq_factor: missing; rope.type llama3 needs it"),
        ({"type": "longrope", "long_factor": [1.0] * 4}, "rope.short_factor: missing; rope.type longrope needs it"),
        ({"type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}, "rope.high_freq_factor 4 must be above"),
        ({"type": "yarn", "beta_fast": 1.0, "beta_slow": 2.0}, "rope.beta_fast 1 must be above beta_slow 2"),
        ({"type": "yarn", "beta_fast": 0.5}, "rope.beta_fast 0.5 must be above beta_slow 1"),
        ({"type": "yarn", "mscale": 1.0}, "rope.mscale 1: counts beside mscale_all_dim and without attention_factor"),
    ],
)
def test_parameters_that_do_not_fit_each_other_or_are_missing_are_refused(settings, message):
    assert message in refused(lambda: extend(tiny_config(), RopeConfig(**settings), LENGTH))


def test_a_setting_is_held_against_what_the_model_says():
    config = tiny_config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "beta_fast": 8.0})
    config.rope_parameters["original_max_position_embeddings"] = POSITIONS
    assert "rope.beta_fast 8 must be above beta_slow 8" in refused(
        lambda: extend(config, RopeConfig(type="yarn", beta_slow=8.0), LENGTH)
    )
    new = extend(config, RopeConfig(type="yarn", truncate=False, mscale=0.75, mscale_all_dim=0.5), LENGTH)
    assert new.rope_parameters == config.rope_parameters | {
        "factor": 4.0,
        "truncate": False,
        "mscale": 0.75,
        "mscale_all_dim": 0.5,
    }
    assert "rope.truncate: transformers ignores it" in refused(
        lambda: extend(tiny_config("gemma3_text"), RopeConfig(type="yarn", truncate=False), LENGTH)
    )


# What no number of RoPE is, by key; in a config.json, and in a config that a library made.
NO_NUMBERS = {
    "rope_theta": ["10000", None, 0, -1.0, 1, True, float("nan"), float("inf"), [1e4]],
    "factor": ["2", 0.0, -2, False, float("nan")],
    "original_max_position_embeddings": ["64", None, 0, 1.5e9, float("nan")],
    "partial_rotary_factor": ["0.5", None, 0.0, 1.5, True],
    "attention_factor": ["1", -1.0, float("nan"), True],
    "beta_fast": ["32", -1, float("inf")],
    "mscale": ["1", float("nan")],
    "truncate": ["false", None, 1],
    "low_freq_factor": ["1", None, 0.0],
    "long_factor": ["1", None, [1.0, "2"], [1.0, float("nan")], [0.0], 2.0],
    "rope_type": [3, None, True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in NO_NUMBERS for value in NO_NUMBERS[name]])
def test_a_number_of_rope_that_is_none_is_named(name, value, tmp_path):
    table = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}
    config = tiny_config(rope_parameters=dict(table))
    config.rope_parameters[name] = value
    assert f"rope: the model's config has {name} {value!r}, which is not" in refused(
        lambda: extend(config, RopeConfig(type="yarn"), LENGTH)
    )
    for where in ({"rope_parameters": table | {name: value}}, {"rope_scaling": table | {name: value}}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **where}), "utf-8")
        assert f"its config.json has {next(iter(where))}.{name} {value!r}, which is not" in refused(
            lambda: open_config(str(tmp_path))
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": "10000"}, "rope_theta '10000', which is not a number above 1 and up to 1e+38"),
        ({"rope_theta": 0}, "rope_theta 0, which is not a number above 1"),
        ({"rope_scaling": "yarn"}, "rope_scaling 'yarn', which is not a table"),
        ({"rope_parameters": ["yarn"]}, "rope_parameters ['yarn'], which is not a table"),
        ({"rope_parameters": {"full_attention": {"rope_theta": "1"}}}, "rope_parameters.full_attention.rope_theta '1'"),
        ({"partial_rotary_factor": "1"}, "partial_rotary_factor '1', which is not a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps nan, which is not a number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"initializer_range": float("inf")}, "initializer_range inf, which is not a number"),
        ({"some": {"list": [1.0, float("nan")]}}, "some.list nan, which is not a number"),
    ],
)
def test_a_number_of_a_config_that_is_none_is_named(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **changes}), "utf-8")
    assert message in refused(lambda: extend(open_config(str(tmp_path)), RopeConfig(type="yarn"), LENGTH))


def test_a_config_without_rope_parameters_has_transformers_defaults(tmp_path):
    for changes in ({}, {"rope_parameters": None}, {"rope_parameters": {}}, {"rope_scaling": None}):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES, **changes}), "utf-8")
        extended = extend(open_config(str(tmp_path)), RopeConfig(type="linear"), LENGTH)
        assert extended.rope_parameters == {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def test_rows_of_many_times_the_length_are_warned_of():
    assert warn_of_stretch(4096, 64 * 4096) == ""
    assert "pack.sequence_length 1,048,576 is 256 times the 4,096 positions" in warn_of_stretch(4096, 2**20)


def test_a_type_that_transformers_does_not_know_is_refused_unless_it_is_replaced():
    config = tiny_config()
    config.rope_parameters = {"rope_type": "banana", "rope_theta": 1e4}
    with pytest.raises(UserError, match="rope_type 'banana', which transformers does not know"):
        extend(config, RopeConfig(), 16)
    assert extend(config, RopeConfig(type="yarn"), LENGTH).rope_parameters["rope_type"] == "yarn"
    config.auto_map = {"AutoModelForCausalLM": "its.own"}
    assert extend(config, RopeConfig(), 16).rope_parameters["rope_type"] == "banana"


def test_layers_with_a_window_keep_their_rope():
    config = tiny_config("gemma3_text")
    before = copy.deepcopy(config.rope_parameters)
    new = extend(config, RopeConfig(type="yarn"), 2 * POSITIONS)
    assert new.rope_parameters["sliding_attention"] == before["sliding_attention"]
    assert new.rope_parameters["full_attention"] == before["full_attention"] | {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": POSITIONS,
    }
    assert new.max_position_embeddings == 2 * POSITIONS


def test_a_model_without_plain_rope_can_only_be_kept():
    from transformers import GPT2Config

    config = GPT2Config(n_positions=POSITIONS)
    assert extend(config, RopeConfig(), POSITIONS).max_position_embeddings == POSITIONS
    with pytest.raises(UserError, match=r"gpt2\) does not use one RoPE .*; rope\.type and rope\.theta must be keep"):
        extend(config, RopeConfig(theta=5e5), POSITIONS)
    with pytest.raises(UserError, match=rf"holds {POSITIONS} positions and has no RoPE to extend; give at most"):
        extend(config, RopeConfig(), POSITIONS + 1)


@pytest.mark.parametrize(("weights", "factor"), [((1.0, 1.0), 1.0), ((0.75, 0.5), 1.103972 / 1.069315)])
def test_readers_that_leave_mscale_out_are_told_the_factor(weights, factor):
    """vllm-project/vllm#48621: they took 1.2773 where transformers takes 1."""
    settings = {"type": "yarn", "mscale": weights[0], "mscale_all_dim": weights[1]}
    (note,) = reader_notes(extend(tiny_config(), RopeConfig(**settings), LENGTH))
    said = float(note.partition('"attn_factor": ')[2].partition(" ")[0])
    assert said == pytest.approx(factor / (0.1 * math.log(4) + 1), rel=1e-5)
    assert reader_notes(extend(tiny_config(), RopeConfig(type="yarn"), LENGTH)) == []
