"""Controls and remedies against slow twins, and the lists of conditions."""

from dataclasses import fields

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxref.model import to_arrays
from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rounding import NO_SITES, SITES, Rounding, preset
from jaxref.tests.decoders import UNIT_RATIO, tiny
from ropestudy.compute.conditions import EXACT, Condition, off_alone, off_together, on_alone, remedies
from ropestudy.compute.engine import Pair, Row, Stream, compare
from ropestudy.compute.measures import sample
from ropestudy.compute.methods import AS_THE_ORACLE, Method, phases_C, rotate_heads, tables, two_terms
from ropestudy.tests.test_measures import FULL, IDS, TOKENS

pytestmark = pytest.mark.usefixtures("quickly_compiled")

RANDOM = np.random.default_rng(3)
POSITIONS = np.arange(5)[None] + 1000
FREQUENCIES = 10000.0 ** -np.linspace(0, 1, 4)
X = RANDOM.normal(size=(1, 5, 2, 8))


def test_the_default_method_is_the_oracles_rotation():
    for name in ("exact", "hf_eager_bf16"):
        rounding = preset(name)
        table = tables(POSITIONS, FREQUENCIES, 1.0, rounding, AS_THE_ORACLE)
        cos, sin = cos_sin(POSITIONS, FREQUENCIES, 1.0, rounding)
        x = jnp.asarray(X, rounding.dtype)
        ours = rotate_heads(x, table, rounding, AS_THE_ORACLE, "q_rotated")
        assert np.array_equal(ours, rotate(x, cos, sin, rounding, "q_rotated"))


@pytest.mark.parametrize("phases", [None, 0, 1])
def test_float64_angles_and_phases_turn_as_complex_numbers(phases):
    method, results = Method(angles="float64", phases=phases), []
    pairs = X[..., :4] + 1j * X[..., 4:]
    angle = np.longdouble(POSITIONS[0])[:, None] * FREQUENCIES + phases_C(method, 4)
    turned = pairs * np.exp(1j * angle.astype(np.clongdouble))[None, :, None]
    truth = np.concatenate([turned.real, turned.imag], axis=-1)
    for name in ("exact", "fp32"):
        rounding = preset(name)
        table = tables(POSITIONS, FREQUENCIES, 1.0, rounding, method)
        results.append(rotate_heads(jnp.asarray(X, rounding.dtype), table, rounding, method, "q_rotated"))
    # numpy's float64 angle is rounded once too, which float32's own roundings hide: at 1,000 radians, 2^-53 of it.
    assert np.abs(np.asarray(results[0]) - truth).max() <= 4 * 2.0**-53 * np.abs(angle).max() * np.abs(pairs).max()
    assert (np.ptp(phases_C(method, 4)) > 0) == (phases is not None)
    assert not np.array_equal(np.asarray(results[1]), truth)


def test_two_terms_of_bf16_twice():
    x = RANDOM.normal(size=1000).astype(np.float32)
    high = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    low = (x - high).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert np.array_equal(two_terms(jnp.asarray(x), "bf16"), high + low)
    assert np.abs(high + low - x).max() < np.abs(high - x).max() / 100


def test_rounding_before_the_rotation_leaves_nothing_to_a_shift():
    decoder, shifted = tiny("llama"), np.arange(TOKENS) + np.array([[0], [16]])
    before = Condition("before", EXACT.rounding, Method(before="bf16"))
    after = Condition("after", EXACT.rounding.replace(q_rotated="bf16", k_rotated="bf16"))
    fp32 = Condition("fp32", preset("fp32"))
    pairs = [Pair((0, 0), (0, 1), "propagated"), Pair((0, 0), (1, 0), "propagated")]
    d = {}
    for one in (before, after, fp32):
        streams = [Stream(one, shifted), Stream(EXACT, shifted)]
        d[one.name] = [sample(s, FULL).d for s in compare(decoder, Row(IDS, FULL), streams, pairs)[0]]
    noise = 2 * d["fp32"][0] * UNIT_RATIO + 2.0**-53 * TOKENS * decoder.config.num_hidden_layers * 4
    assert d["before"][0] <= noise < d["before"][1]  # it does round, only the same at both shifts
    assert d["after"][0] > noise


def test_every_site_is_switched_on_and_off_alone():
    """A site that someone adds to `Rounding` is in the factorial without a word."""
    sites = {field.name for field in fields(Rounding)} - set(NO_SITES)
    assert {one.site for one in on_alone()} == sites
    for one in on_alone():
        changed = {site for site in SITES if getattr(one.rounding, site) is not None}
        assert changed == {one.site}
        assert one.rounding.carrier == "float64"
    for base in ("hf_eager_bf16", "flash_bf16"):
        whole = preset(base)
        assert {one.site for one in off_alone(base)} == {site for site in SITES if getattr(whole, site) is not None}
        for one in off_alone(base):
            assert one.rounding.replace(carrier=whole.carrier, **{one.site: getattr(whole, one.site)}) == whole
            assert getattr(one.rounding, one.site) is None


def test_sites_in_a_row_are_left_out_together():
    names = {one.site for one in off_together("hf_eager_bf16")}
    rotation = "rope_sum, q_rotated, k_rotated, kv_heads"
    assert names == {rotation, f"table, rope_product, {rotation}", "qk, scaled", "pv, attn_out"}
    for one in off_together("flash_bf16"):
        sites = str(one.site).split(", ")
        assert one.rounding == preset("flash_bf16").without(*sites)


@pytest.mark.parametrize("base", ["hf_eager_bf16", "flash_bf16"])
def test_without_all_of_ropes_roundings_two_shifts_agree(base):
    """And without those behind the sum alone they do not: the table and the products round as well."""
    decoder, shifted = tiny("llama"), np.arange(TOKENS) + np.array([[0], [16]])
    last, all_of_them = (one for one in off_together(base) if "q_rotated" in str(one.site))
    each = []
    for one in (Condition(base, preset(base)), last, all_of_them):
        # In a float64 carrier: what it rounds itself, in the angles too, is far below the half precision's.
        carried = Condition(one.name, one.rounding.replace(carrier="float64", angle=None))
        sums, _ = compare(decoder, Row(IDS, FULL), [Stream(carried, shifted)], [Pair((0, 0), (0, 1), "local")])
        each.append(sample(sums[0], FULL).d)
    whole, behind_the_sum, nothing = each
    assert nothing < 2.0**-40 * whole < behind_the_sum


def test_remedies_that_leave_q_and_k_unrounded_leave_their_copies_too():
    """Copies of k for each query head are rounded too (`kv_heads`): left in, they would undo the remedy."""
    for base in ("hf_eager_bf16", "flash_bf16"):
        kept = [one for one in remedies(base) if "split" in one.name or "fp32 q and k" in one.name]
        assert len(kept) == 2
        for one in kept:
            assert one.method.split or {one.rounding.q_rotated, one.rounding.k_rotated} <= {None, "fp32"}
            assert one.rounding.kv_heads in (None, "fp32")


def test_rope_does_not_look_at_the_shift():
    """`dynamic` looks at the largest position: at two shifts it would be two functions, and D would not be rounding."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    decoder = tiny("llama", rope_parameters=rope, max_position_embeddings=8)
    shifted = np.arange(TOKENS) + np.array([[0], [100]])
    sums, _ = compare(decoder, Row(IDS, FULL), [Stream(EXACT, shifted)], [Pair((0, 0), (0, 1), "local")])
    frequencies = inverse_frequencies(decoder.config.rope, TOKENS)[0]
    assert not np.array_equal(frequencies, inverse_frequencies(decoder.config.rope, TOKENS + 100)[0])
    largest = max(np.abs(np.asarray(x)).max() for x in to_arrays(decoder).values())
    assert sample(sums[0], FULL).d < 2.0**-24 * largest  # float64's own noise, nowhere near float32's
