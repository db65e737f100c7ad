"""Formats against numpy's and ml_dtypes' own casts, gradients, presets."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from anchorline.errors import UserError
from jaxref.rounding import FORMATS, PRESETS, SITES, FloatFormat, Rounding, find_format, preset, round_to

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
@pytest.mark.parametrize("fmt", DTYPES)
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


BYTES = {
    "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e3m4": ml_dtypes.float8_e3m4,
    "e2m3": ml_dtypes.float6_e2m3fn, "e3m2": ml_dtypes.float6_e3m2fn,
}  # fmt: skip


def every_half(carrier: str) -> np.ndarray:
    """Every number of fp16 and of bf16 that the carrier keeps, infinities and NaN among them."""
    bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        found = np.concatenate([bits.view(dtype).astype(carrier) for dtype in (np.float16, ml_dtypes.bfloat16)])
    return found[~((np.abs(found) < 2.0**-120) & (found != 0))]


@pytest.mark.parametrize("carrier", ["float32", "float64"])
@pytest.mark.parametrize("fmt", BYTES)
def test_every_half_precision_number_becomes_the_byte_that_ml_dtypes_makes_of_it(fmt, carrier):
    x, form = every_half(carrier), find_format(fmt)
    assert form is not None
    with np.errstate(all="ignore"):
        expected = x.astype(BYTES[fmt]).astype(carrier)
    if fmt in ("e2m3", "e3m2"):  # these two saturate in ml_dtypes and have one exponent more: within ours alone
        x, expected = (array[np.abs(x) <= form.largest] for array in (x, expected))
    rounded = np.asarray(round_to(jnp.asarray(x), fmt))
    np.testing.assert_array_equal(rounded, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(rounded[number]), np.signbit(x[number]))
    if f"{fmt}_sat" in FORMATS:
        saturated = np.asarray(round_to(jnp.asarray(x), f"{fmt}_sat"))
        over = ~np.isnan(x) & ~np.isfinite(expected)
        np.testing.assert_array_equal(saturated[~over], expected[~over])
        np.testing.assert_array_equal(saturated[over], np.copysign(form.largest, x[over]))


def numbers_of(form: FloatFormat) -> np.ndarray:
    """Every number that is not negative of a format, counted out one by one: mantissas within exponents; and the one
    that would follow the largest.
    """
    steps = 2**form.mantissa_bits
    low = form.smallest_normal_exponent
    codes = 2**form.exponent_bits - (0 if form.finite else 1)
    found = [m / steps * 2.0**low for m in range(steps)]
    for code in range(1, codes):
        found += [(1 + m / steps) * 2.0 ** (low + code - 1) for m in range(steps)]
    if form.finite:
        found = found[:-1]  # the last is NaN
    return np.array([*found, found[-1] + (found[-1] - found[-2])])


@pytest.mark.parametrize("fmt", ["e4m03", "e04m3", "e4m0", "e0m3", "e4m\u0663", "e\u0664m3", "e4m3 ", "E4M3", "e4m"])
def test_a_format_has_one_spelling(fmt):
    """`e4m03` would be IEEE's e4m3, which has infinities, and not OCP's of that name."""
    assert find_format(fmt) is None


@pytest.mark.parametrize("fmt", ["e2m1", "e3m2", "e4m3", "e4m3_sat", "e5m2", "e5m2_sat", "e5m10", "e4m7", "e6m1"])
def test_the_nearest_of_all_numbers_and_of_two_the_even_one(fmt):
    form = find_format(fmt)
    assert form is not None
    table = numbers_of(form)
    assert table[-2] == form.largest
    middles = (table[1:] + table[:-1]) / 2
    x = np.concatenate([table, middles, np.nextafter(middles, 0), np.nextafter(middles, np.inf), [4 * table[-1]]])
    place = np.searchsorted(middles, x)  # a tie goes down; up where that one is odd
    tie = (place < len(middles)) & (x == middles[np.minimum(place, len(middles) - 1)])
    place += tie & (place % 2 == 1)
    over = place == len(table) - 1
    beyond = form.largest if form.saturates else np.nan if form.finite else np.inf
    expected = np.where(over, beyond, table[place])
    np.testing.assert_array_equal(round_to(jnp.asarray(x), fmt), expected)
    np.testing.assert_array_equal(round_to(jnp.asarray(-x), fmt), -expected)
    assert form.largest == table[-2]


def test_a_scale_moves_the_range_and_no_mantissa():
    x = jnp.asarray(np.random.default_rng(3).uniform(0, 1, 1000) ** 8)
    np.testing.assert_array_equal(round_to(x, "e4m3_probs"), round_to(x * 256, "e4m3_sat") / 256)
    assert (round_to(x, "e4m3_probs") != round_to(x, "e4m3_sat")).any()


def test_a_format_wider_than_the_carrier_rounds_nothing():
    x = jnp.asarray(np.random.default_rng(4).normal(size=100), jnp.float32)
    for fmt in ("fp32", "e11m52", "e8m30"):
        np.testing.assert_array_equal(round_to(x, fmt), x)


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
        assert eager == set(SITES) - {"position", "inv_freq", "angle"}
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
        (
            lambda: Rounding("float64", qk="e1m3"),
            "qk: 'e1m3' is unknown; choose from None, bf16.* or eXmY with 2 to 11",
        ),
        (lambda: Rounding("float64", qk="e8m53"), "qk: 'e8m53' is unknown"),
        (lambda: Rounding("float64", qk="e8m7 "), "qk: 'e8m7 ' is unknown"),
        (lambda: Rounding("float64", qk=7), "qk: 7 is unknown"),
        (lambda: Rounding("float64", normalise="never"), "normalise: 'never' is unknown"),
        (lambda: preset("exact").replace(softmax="bf16"), "softmax: no such site; the sites are position"),
        (lambda: preset("exact").only("softmax"), "softmax: no such site"),
        (lambda: preset("exact").without("softmax"), "softmax: no such site"),
    ],
)
def test_what_does_not_exist_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_format_finer_than_its_carrier_is_refused():
    with pytest.raises(UserError, match="'e8m30' has more mantissa bits than its carrier, float32"):
        Rounding("float32", qk="e8m30")
    assert Rounding("float64", qk="e8m30").qk == "e8m30"
