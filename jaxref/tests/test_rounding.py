"""Formats against numpy's and ml_dtypes' own casts, gradients, presets."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxref.rounding import FORMATS, PRESETS, SITES, Rounding, preset, round_to

DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}


def values_near(fmt: str, carrier: str) -> np.ndarray:
    """Every exponent of the format and one below, ties and their neighbours, overflow, infinities, NaN, both zeros."""
    dtype, kind = DTYPES[fmt], np.dtype(carrier).type
    info = ml_dtypes.finfo(dtype)
    lowest = info.minexp - info.nmant - 2 if kind is np.float64 else max(info.minexp - info.nmant - 2, -126)
    powers = 2.0 ** np.arange(lowest, info.maxexp, dtype=np.float64)
    steps = np.array([1, 1 + 1 / 3, 1 + 2.0 ** -(info.nmant + 1), 1 + 3 * 2.0 ** -(info.nmant + 1), 1.75 + 2.0**-20])
    numbers = np.concatenate([np.outer(powers, steps).ravel(), [float(info.max), np.inf, np.nan, 0.0]]).astype(kind)
    with np.errstate(over="ignore"):
        numbers = np.concatenate([numbers, np.nextafter(numbers, kind(0)), np.nextafter(numbers, kind(np.inf))])
    # XLA on a CPU flushes the carrier's own subnormals.
    numbers = numbers[~((np.abs(numbers) < np.finfo(kind).tiny) & (numbers != 0))]
    return np.concatenate([numbers, -numbers])


@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("carrier", ["float32", "float64"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rounds_as_the_hardware_casts(fmt, carrier, compile_):
    x = values_near(fmt, carrier)
    rounded = (jax.jit(round_to, static_argnums=1) if compile_ else round_to)(jnp.asarray(x), fmt)
    with np.errstate(over="ignore"):
        # ml_dtypes rounds float64 to bfloat16 by way of float32, that is twice; rounding to odd first makes it once.
        expected = (to_odd_float32(x) if fmt == "bf16" else x).astype(DTYPES[fmt]).astype(carrier)
    assert rounded.dtype == carrier
    np.testing.assert_array_equal(rounded, expected)
    np.testing.assert_array_equal(np.signbit(rounded), np.signbit(expected))


def to_odd_float32(x: np.ndarray) -> np.ndarray:
    """Float32 with the last bit set wherever float64 did not fit: no tie of a shorter format is made or lost."""
    if x.dtype == np.float32:
        return x
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    toward_zero = np.where(np.abs(near.astype(np.float64)) > np.abs(x), np.nextafter(near, np.float32(0)), near)
    inexact = toward_zero.astype(np.float64) != x
    return np.where(inexact & np.isfinite(x), (toward_zero.view(np.int32) | 1).view(np.float32), near)


def test_one_rounding_from_float64_and_not_two():
    just_above_a_tie = 1 + 2.0**-8 + 2.0**-40
    assert round_to(jnp.float64(just_above_a_tie), "bf16") == 1 + 2.0**-7
    assert jnp.float64(just_above_a_tie).astype(jnp.float32).astype(jnp.bfloat16) == 1


def test_compiling_drops_no_rounding():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)

    def chain(x):
        return round_to(round_to(x * 1.5, "bf16") * x + round_to(x / 3, "bf16"), "bf16")

    np.testing.assert_array_equal(jax.jit(chain)(x), chain(x))


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_gradient_is_rounded_alike(fmt):
    x, cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(2, 50)))
    _, pull = jax.vjp(lambda x: round_to(x, fmt), x)
    np.testing.assert_array_equal(pull(cotangent)[0], round_to(cotangent, fmt))
    assert (pull(cotangent)[0] != cotangent).all()


def test_cotangents_meet_in_the_carrier_and_are_rounded_once():
    rounding = Rounding("float64", embed="bf16")
    a, b = 1 + 2.0**-8, 2.0**-8  # a is a tie of bf16 and goes to 1, a + b is a number of bf16
    gradient = jax.grad(lambda x: (y := rounding.round("embed", x)) * a + y * b)(jnp.float64(1.0))
    assert gradient == 1 + 2.0**-7


@pytest.mark.parametrize("site", SITES)
def test_a_site_rounds_there_alone(site):
    rounding, x = Rounding("float64").replace(**{site: "bf16"}), jnp.asarray([1 / 3])
    assert {name for name in SITES if (rounding.round(name, x) != x).any()} == {site}
    assert rounding == Rounding("float64", **dict.fromkeys(SITES, "bf16")).only(site)
    assert rounding.without(site) == preset("exact")


def test_another_dtype_than_the_carrier_is_a_bug():
    with pytest.raises(AssertionError, match="qk: float32 in a float64 carrier"):
        preset("exact").round("qk", jnp.zeros(1, jnp.float32))


def rounded_sites(name: str) -> set[str]:
    return {site for site in SITES if getattr(preset(name), site) in ("bf16", "fp16")}


def test_presets():
    assert preset("exact").carrier == "float64"
    assert preset("fp32").carrier == "float32"
    assert rounded_sites("exact") | rounded_sites("fp32") == set()
    rope, scores = {"table", "rope_product", "rope_sum"}, {"qk", "scaled", "pv"}
    for half in ("bf16", "fp16"):
        eager, flash, paper = (rounded_sites(f"{name}_{half}") for name in ("hf_eager", "flash", "paper"))
        assert eager == set(SITES) - {"inv_freq", "angle"}
        assert eager - flash == scores
        assert flash - paper == rope
        orders = {name: preset(f"{name}_{half}").normalise for name in ("hf_eager", "flash", "paper")}
        assert orders == {"hf_eager": "before_pv", "flash": "after_pv", "paper": "after_pv"}
    assert len({hash(rounding) for rounding in PRESETS.values()}) == len(PRESETS)


def test_a_float32_site_survives_a_float64_carrier():
    rounding = preset("hf_eager_bf16").replace(carrier="float64")
    third = jnp.asarray([1 / 3])
    np.testing.assert_array_equal(rounding.round("angle", third), np.float64(np.float32(1 / 3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: preset("bf16"), "rounding: 'bf16' is not a preset; choose from exact, fp32"),
        (lambda: Rounding("bfloat16"), "carrier: 'bfloat16' is unknown; choose from float64, float32"),
        (lambda: Rounding("float64", qk="int8"), "qk: 'int8' is unknown; choose from None, bf16, fp16, fp32"),
        (lambda: Rounding("float64", normalise="never"), "normalise: 'never' is unknown"),
        (lambda: preset("exact").replace(softmax="bf16"), "softmax: no such site; the sites are inv_freq"),
        (lambda: preset("exact").only("softmax"), "softmax: no such site"),
        (lambda: preset("exact").without("softmax"), "softmax: no such site"),
    ],
)
def test_what_does_not_exist_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
