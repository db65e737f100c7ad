"""Frequencies, tables and rotation against mpmath with derived bounds; configs read and written."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import mpmath
import numpy as np
import pytest

from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rope_spec import PAPER_ROPE_THETA, RopeSpec
from jaxref.rounding import preset

ORIGINAL = 8192
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": ORIGINAL,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": tuple(1 + i / 64 for i in range(32)),
    "long_factor": tuple(1.0 + i for i in range(32)),
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
EVERY_TYPE = (
    {},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 4.0},
    DYNAMIC,
    YARN,
    LLAMA3,
    LONGROPE,
)
U = mpmath.mpf(2) ** -53  # unit roundoff of float64


@pytest.fixture(autouse=True)
def _two_hundred_bits():
    with mpmath.workprec(200):
        yield


def plain(theta: float, head_dim: int) -> list:
    return [mpmath.mpf(theta) ** (-mpmath.mpf(2 * i) / head_dim) for i in range(head_dim // 2)]


def assert_nearest(got: np.ndarray, exact: list) -> None:
    np.testing.assert_array_equal(got, [float(x) for x in exact])


@pytest.mark.parametrize("theta", [1e4, 5e5, 1234.5, *PAPER_ROPE_THETA.values()])
@pytest.mark.parametrize("head_dim", [2, 64, 96, 128])
def test_default_is_the_float64_number_nearest_to_the_formula(theta, head_dim):
    frequencies, scaling = inverse_frequencies(RopeSpec(head_dim, theta))
    assert frequencies.dtype == np.float64
    assert scaling == 1
    assert_nearest(frequencies, plain(theta, head_dim))


def test_linear_and_ntk():
    linear, _ = inverse_frequencies(RopeSpec(64, 1e4, "linear", factor=3.0))
    assert_nearest(linear, [f / 3 for f in plain(1e4, 64)])
    ntk, _ = inverse_frequencies(RopeSpec(64, 1e4, "ntk", factor=3.0))
    assert_nearest(ntk, plain(mpmath.mpf(1e4) * mpmath.mpf(3) ** (mpmath.mpf(64) / 62), 64))
    # What it is for: the fastest pair is kept, the slowest stretched by the factor.
    assert ntk[0] == 1
    np.testing.assert_array_equal(ntk[-1], float(plain(1e4, 64)[-1] / 3))


def test_yarn_attention_scaling():
    def scaling(**given):
        return inverse_frequencies(RopeSpec(64, 1e4, **YARN, **given))[1]

    ln4 = mpmath.log(4)
    assert scaling() == float(ln4 / 10 + 1)
    assert scaling(attention_factor=0.5) == 0.5
    assert scaling(mscale=2.0, mscale_all_dim=3.0) == float((ln4 * 2 / 10 + 1) / (ln4 * 3 / 10 + 1))
    assert scaling(mscale=2.0) == float(ln4 / 10 + 1)


@pytest.mark.parametrize("parameters", EVERY_TYPE, ids=lambda p: p.get("rope_type", "default"))
def test_exact_tables_of_every_type_up_to_a_million_positions(parameters):
    """From the frequencies as they are: the angle rounds once and a faithful cos errs by u, both times the attention
    scaling, which rounds the product.
    """
    positions = [0, 1, 4095, 131_071, 1_048_575]
    frequencies, scaling = inverse_frequencies(RopeSpec(64, 5e5, **parameters), positions[-1] + 1)
    tables = cos_sin([positions], frequencies, scaling, preset("exact"))
    for table, function in zip(tables, (mpmath.cos, mpmath.sin), strict=True):
        assert table.dtype == jnp.float64
        for row, position in zip(np.asarray(table[0]), positions, strict=True):
            for got, frequency in zip(row.tolist(), frequencies.tolist(), strict=True):
                angle = position * mpmath.mpf(frequency)
                error = scaling * (angle * U + U)
                assert abs(got - scaling * function(angle)) <= error + U * (scaling + error)


def test_rotation_is_that_of_complex_numbers():
    """Two products and a sum: relative error at most gamma_2 = 2u / (1 - 2u) of the terms' absolute values."""
    rng = np.random.default_rng(0)
    x_BTHD = rng.normal(size=(2, 3, 2, 8))  # the last two of a head are left as they are
    cos, sin = cos_sin(rng.integers(0, 1000, size=(2, 3)), [1.0, 0.1, 0.01], 1.0, preset("exact"))
    got = np.asarray(rotate(x_BTHD, cos, sin, preset("exact"), "q_rotated"))
    np.testing.assert_array_equal(got[..., 6:], x_BTHD[..., 6:])
    for b, t, h, c in np.ndindex(2, 3, 2, 3):
        z = mpmath.mpc(*(float(x_BTHD[b, t, h, i]) for i in (c, c + 3)))
        turn = mpmath.mpc(float(cos[b, t, c]), float(sin[b, t, c]))
        bound = 2 * U / (1 - 2 * U) * 2 * abs(z) * abs(turn)
        assert abs(z * turn - mpmath.mpc(float(got[b, t, h, c]), float(got[b, t, h, c + 3]))) <= bound


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "jit"])
def test_hf_eager_rotation_is_arithmetic_in_half_precision(half, compile_):
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[half]
    rounding, rng = preset(f"hf_eager_{half}"), np.random.default_rng(1)
    x_BTHD = rng.normal(size=(1, 50, 2, 8)).astype(dtype)
    cos, sin = cos_sin(np.arange(50)[None] + 8000, inverse_frequencies(RopeSpec(8, 1e4))[0], 1.0, rounding)

    def run(x_BTHD):
        return rotate(x_BTHD, cos, sin, rounding, "q_rotated")

    got = (jax.jit(run) if compile_ else run)(jnp.asarray(x_BTHD.astype(np.float32)))
    a, b = np.split(x_BTHD, 2, axis=-1)
    c, s = (np.asarray(table)[:, :, None].astype(dtype) for table in (cos, sin))
    expected = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    assert expected.dtype == dtype
    np.testing.assert_array_equal(got, expected.astype(np.float32))


def test_each_rounding_of_the_tables():
    frequencies, positions = np.array([1.0, 1 / 3]), np.array([[1001]])

    def bf16(x):
        return np.asarray(x, ml_dtypes.bfloat16).astype(np.float64)

    exact = preset("exact")
    for site, angle in (
        ("inv_freq", 1001 * bf16(frequencies)),
        ("angle", bf16(1001 * frequencies)),
    ):
        cos, _ = cos_sin(positions, frequencies, 1.0, exact.replace(**{site: "bf16"}))
        np.testing.assert_array_equal(cos[0, 0], jnp.cos(jnp.asarray(angle)))
    cos, sin = cos_sin(positions, frequencies, 1.5, exact.replace(table="bf16"))
    np.testing.assert_array_equal(cos[0, 0], bf16(1.5 * np.asarray(jnp.cos(1001 * frequencies))))
    np.testing.assert_array_equal(sin[0, 0], bf16(1.5 * np.asarray(jnp.sin(1001 * frequencies))))


BASE = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": ORIGINAL}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RopeSpec(64, 1e4)),
        ({"rope_theta": 5e5, "head_dim": 32}, RopeSpec(32, 5e5)),
        ({"partial_rotary_factor": 0.355}, RopeSpec(22, 1e4)),  # 22.72 of 64
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, RopeSpec(32, 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}}, RopeSpec(64, 5e5, "linear", factor=2)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1.5}, RopeSpec(64, 1e6)),
        ({"rope_parameters": {"rope_theta": 1e4, **DYNAMIC}}, RopeSpec(64, 1e4, **DYNAMIC)),
        ({"rope_parameters": {"rope_theta": 1e4, **YARN, "beta_fast": None}}, RopeSpec(64, 1e4, **YARN)),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": None}}, None),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k[0] != "o"}}, RopeSpec(64, 1e4, **LLAMA3)),
        ({"rope_scaling": json.loads(json.dumps(LONGROPE))}, RopeSpec(64, 1e4, **LONGROPE)),
        (
            {
                "max_position_embeddings": 4 * ORIGINAL,
                "original_max_position_embeddings": ORIGINAL,
                "rope_scaling": {k: LONGROPE[k] for k in ("rope_type", "short_factor", "long_factor")},
            },
            RopeSpec(64, 1e4, **LONGROPE),
        ),
    ],
)
def test_reading_configs_of_either_kind(fields, expected):
    if expected is None:
        with pytest.raises(ValueError, match="original_max_position_embeddings: missing"):
            RopeSpec.from_hf(BASE | fields)
    else:
        assert RopeSpec.from_hf(BASE | fields) == expected


@pytest.mark.parametrize("parameters", EVERY_TYPE, ids=lambda p: p.get("rope_type", "default"))
def test_to_hf_reads_back_as_the_same_frequencies(parameters):
    spec = RopeSpec(64, 5e5, **parameters)
    back = RopeSpec.from_hf(BASE | {"rope_parameters": json.loads(json.dumps(spec.to_hf()))})
    if spec.rope_type != "ntk":
        assert back == spec
    else:
        # The base is written with one rounding, and a frequency is a power of it with an exponent of at most 1.
        got, expected = inverse_frequencies(back)[0], inverse_frequencies(spec)[0]
        assert (np.abs(got - expected) <= 3 * float(U) * expected).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((64, 1e4, "su"), "rope_type: 'su' is unknown; choose from default, linear"),
        ((63, 1e4), "head_dim: 63; RoPE rotates pairs, give an even number from 2"),
        ((2, 1e4, "ntk", 2.0), "head_dim: 2; RoPE rotates pairs, give an even number from 4"),
        ((64, 1.0), "theta: 1.0; give a number above 1"),
        ((64, "1e4"), "theta: '1e4'; give a number above 1"),
        ((64, 1e4, "default", 2.0), "factor: rope_type 'default' does not use it"),
        ((64, 1e4, "linear"), "factor: missing, and rope_type 'linear' needs it"),
        ((64, 1e4, "linear", 0.5), "factor: 0.5; give numbers from 1"),
        ((64, 1e4, "linear", float("nan")), "factor: nan; give numbers from 1"),
    ],
)
def test_impossible_specs_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec(*arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (LONGROPE | {"long_factor": (1.0,)}, "long_factor: 1 numbers; give one for each of 32 pairs"),
        (LONGROPE | {"short_factor": (0.0,) * 32}, "short_factor: .* give numbers from 1e-06 to"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor: 4.0 is not below high_freq_factor 4.0"),
        (YARN | {"beta_slow": 0.0}, "beta_slow: 0.0; give numbers from 1e-06 to"),
    ],
)
def test_impossible_parameters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec(64, 1e4, **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_rotary_factor": 0.3}, "partial_rotary_factor: 0.3 of head_dim 64 rotates 19 dimensions"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor: 1.5; give a number above 0, and up to 1"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type: 'ntk' is not implemented; known in a config"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type: 'mrope' is not implemented"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "rope_parameters: mrope_section not implemented"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "full_attention, sliding_attention not"),
    ],
)
def test_configs_that_rotate_otherwise_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RopeSpec.from_hf(BASE | fields)


BY_LAYER = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "sliding_attention": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        **{k: v for k, v in YARN.items() if k != "rope_type"},
    },
}


def test_parameters_by_layer_type_are_read_for_the_type_that_is_asked_for():
    config = BASE | {"rope_parameters": BY_LAYER}
    assert RopeSpec.from_hf(config, "sliding_attention") == RopeSpec(64, 1e4, **YARN)
    whole = RopeSpec.from_hf(config, "full_attention")
    assert whole == RopeSpec(64, 1e6, "proportional", partial_rotary_factor=0.25)
    frequencies, scaling = inverse_frequencies(whole)
    np.testing.assert_allclose(frequencies[:8], 1e6 ** (-np.arange(8) / 32), rtol=1e-15)
    assert not frequencies[8:].any()
    assert scaling == 1
    halved, _ = inverse_frequencies(dataclasses.replace(whole, factor=2.0))
    np.testing.assert_array_equal(halved, frequencies / 2)
    with pytest.raises(ValueError, match="rope_parameters: none for 'chunked_attention'; there are full_attention, "):
        RopeSpec.from_hf(config, "chunked_attention")
    assert RopeSpec.from_hf(BASE, "full_attention") == RopeSpec(64, 1e4)
