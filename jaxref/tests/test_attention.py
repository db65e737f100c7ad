"""Attention against mpmath written in loops: output, log-sum-exp and gradients; blocks, roundings, isolation,
padding.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import mpmath
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxref.attention import attention
from jaxref.mask import visible_BQJ
from jaxref.rounding import Rounding, preset
from jaxref.tests.decoders import assert_float64_of

B, T, H, K, D = 1, 9, 4, 2, 4
IDS = np.array([[0, 0, 1, 1, 1, 2, 2, -1, -1]])
EXACT, FP32 = preset("exact"), preset("fp32")
NAMES = ("out", "lse", "dq", "dk", "dv")


@cache
def inputs() -> tuple[np.ndarray, ...]:
    """q, k, v and weights on the output and on the log-sum-exp, all exact in float32."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, H, D), (B, T, K, D), (B, T, K, D), (B, T, H, D), (B, H, T))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


SINKS = (-1.0, 0.5, 2.0, 0.25)


def run(
    rounding: Rounding, ids=IDS, arrays=None, query_block=None, scale=None, sinks=None, **layer
) -> dict[str, np.ndarray]:
    """Output, log-sum-exp, and the gradients of their weighted sum."""
    arrays = [jnp.asarray(x, rounding.dtype) for x in (arrays or inputs())]
    sinks_H = None if sinks is None else jnp.asarray(sinks, rounding.dtype)
    results = _run(ids, *arrays, sinks_H, rounding, query_block, scale, tuple(layer.items()))
    names = NAMES if sinks is None else (*NAMES, "dsinks")
    return dict(zip(names, map(np.asarray, results), strict=False))


@partial(jax.jit, static_argnums=(7, 8, 9, 10))
def _run(ids, q, k, v, weight, lse_weight, sinks_H, rounding, query_block, scale, layer):
    def attend(q, k, v, sinks_H):
        return attention(q, k, v, ids, rounding, scale, query_block, sinks_H, **dict(layer))

    (out, lse), pull = jax.vjp(attend, q, k, v, sinks_H)
    return out, lse, *pull((weight, lse_weight))


@cache
def truth(
    scale: float | None = None,
    sinks: tuple[float, ...] | None = None,
    softcap: float | None = None,
    window: int | None = None,
    keep_anchor: bool = False,
) -> dict[str, np.ndarray]:
    """The same in 200 bits, a query, a head and a key at a time; gradients by the closed form of the softmax."""
    place = [0, 1, 2, 3, 4, 2, 3, 0, 0]  # of each token of IDS
    with mpmath.workprec(200):
        q, k, v, w, lse_w = (np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])(x)[0] for x in inputs())
        factor = 1 / mpmath.sqrt(D) if scale is None else mpmath.mpf(scale)
        out, dq, dk, dv = (np.full_like(x, mpmath.mpf(0)) for x in (q, q, k, v))
        lse, dsinks = np.full((H, T), -np.inf), np.full(H, mpmath.mpf(0))
        for h in range(H):
            kv = h // (H // K)
            for i in range(T):
                seen = [j for j in range(T) if j <= i and IDS[0, i] != -1 and IDS[0, j] in (0, IDS[0, i])]
                if window is not None:
                    seen = [j for j in seen if place[i] - place[j] < window or (keep_anchor and IDS[0, j] == 0)]
                if not seen:
                    continue
                logits = [factor * (q[i, h] @ k[j, kv]) for j in seen]
                slopes = [mpmath.mpf(1)] * len(seen)
                if softcap is not None:
                    shares = [mpmath.tanh(x / softcap) for x in logits]
                    logits, slopes = [softcap * x for x in shares], [1 - x * x for x in shares]
                weights = [mpmath.exp(x) for x in logits]
                sink = mpmath.mpf(0) if sinks is None else mpmath.exp(sinks[h])
                total = sum(weights) + sink
                lse[h, i] = float(mpmath.log(total))
                probs = [x / total for x in weights]
                out[i, h] = sum(p * v[j, kv] for p, j in zip(probs, seen, strict=True))
                dsinks[h] += sink / total * (lse_w[h, i] - w[i, h] @ out[i, h])
                for p, slope, j in zip(probs, slopes, seen, strict=True):
                    dv[j, kv] += p * w[i, h]
                    d_logit = slope * p * (w[i, h] @ v[j, kv] - w[i, h] @ out[i, h] + lse_w[h, i])
                    dq[i, h] += factor * d_logit * k[j, kv]
                    dk[j, kv] += factor * d_logit * q[i, h]
        arrays = {name: x[None].astype(np.float64) for name, x in zip(NAMES, (out, lse, dq, dk, dv), strict=True)}
        return arrays | {"dsinks": dsinks.astype(np.float64)}


@pytest.mark.parametrize(
    ("query_block", "normalise", "scale"),
    [
        (None, "before_pv", None),
        (None, "after_pv", 0.3),
        (4, "before_pv", 0.3),
        (1, "after_pv", None),
        (20, "before_pv", None),
    ],
)
def test_exact_is_attention_written_in_loops(query_block, normalise, scale):
    got64, got32 = (run(r.replace(normalise=normalise), query_block=query_block, scale=scale) for r in (EXACT, FP32))
    for name in NAMES:
        assert got64[name].dtype == np.float64
        assert got32[name].dtype == np.float32
        assert_float64_of(got64[name], got32[name], truth(scale)[name])


@pytest.mark.parametrize(
    ("layer", "query_block", "normalise"),
    [
        ({"sinks": SINKS}, 4, "before_pv"),
        ({"softcap": 1.5}, None, "after_pv"),
        ({"window": 2}, 4, "after_pv"),
        ({"sinks": SINKS, "softcap": 1.5, "window": 2, "keep_anchor": True}, None, "before_pv"),
        ({"sinks": SINKS, "softcap": 1.5, "window": 2, "keep_anchor": True}, 4, "after_pv"),
    ],
)
def test_sinks_caps_and_windows_are_attention_written_in_loops(layer, query_block, normalise):
    got64, got32 = (run(r.replace(normalise=normalise), query_block=query_block, **layer) for r in (EXACT, FP32))
    for name in got64:
        assert_float64_of(got64[name], got32[name], truth(**layer)[name])


def test_values_narrower_than_keys():
    q, k, v, weight, lse_weight = inputs()
    narrow = run(EXACT, arrays=(q, k, v[..., :3], weight[..., :3], lse_weight))
    wide = run(EXACT, arrays=(q, k, v * [1, 1, 1, 0], weight, lse_weight))
    np.testing.assert_array_equal(narrow["dv"], wide["dv"][..., :3])
    assert narrow["out"].shape == (B, T, H, 3)


@pytest.mark.parametrize("name", ["hf_eager_bf16", "flash_fp16"])
def test_blocks_round_as_dense_does(name):
    """In a float64 carrier the order of sums is too small to move a rounding to half precision."""
    dense, blocks = (run(preset(name).replace(carrier="float64"), query_block=query_block) for query_block in (None, 4))
    np.testing.assert_array_equal(dense["out"], blocks["out"])


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_casts_of_eager_and_flash(half):
    """Against numpy, cast by cast. Logits are made large, so that probabilities reach fp16's subnormals."""
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[half]

    def cast(x):
        return x.astype(dtype).astype(np.float64)

    q, k, v, *weights = inputs()
    q, k, v = cast(8 * q), cast(k), cast(v)
    heads = np.arange(H) // (H // K)
    qk = np.einsum("qhd,khd->hqk", q[0], k[0][:, heads])
    mask, seen = visible_BQJ(IDS)[0], IDS[0] != -1

    def softmax_parts(logits):
        weights = np.where(mask, np.exp(logits - np.where(mask, logits, -np.inf).max(-1, keepdims=True)), 0)[:, seen]
        return weights, weights.sum(-1, keepdims=True)

    with np.errstate(invalid="ignore"):
        eager_weights, eager_total = softmax_parts(cast(cast(qk) * 0.5))
        flash_weights, flash_total = softmax_parts(qk * 0.5)
    eager_probs, flash_probs = cast(eager_weights / eager_total), cast(flash_weights)
    if half == "fp16":
        assert ((flash_probs > 0) & (flash_probs < 2.0**-14)).any()
    expected = {
        "hf_eager": cast(np.einsum("hqk,khd->qhd", eager_probs, v[0][:, heads])),
        "flash": cast(np.einsum("hqk,khd->qhd", flash_probs, v[0][:, heads]) / flash_total.swapaxes(0, 1)),
    }
    for name, want in expected.items():
        rounding = preset(f"{name}_{half}").replace(carrier="float64")
        got = run(rounding, arrays=(q, k, v, *weights))["out"][0, seen]
        np.testing.assert_array_equal(got, want)
    assert (expected["hf_eager"] != expected["flash"]).any()


@pytest.mark.parametrize("query_block", [None, 4])
def test_no_gradient_from_what_is_invisible(query_block):
    mask, q, k, v = visible_BQJ(IDS)[0], *inputs()[:3]
    for i in range(T):
        weight, lse_weight = np.zeros((B, T, H, D)), np.zeros((B, H, T))
        weight[0, i], lse_weight[0, :, i] = inputs()[3][0, i], 1.0
        got = run(EXACT, arrays=(q, k, v, weight, lse_weight), query_block=query_block)
        reached = {name: (got[name][0] != 0).any((1, 2)) for name in ("dq", "dk", "dv")}
        np.testing.assert_array_equal(reached["dk"], mask[i])
        np.testing.assert_array_equal(reached["dv"], mask[i])
        np.testing.assert_array_equal(reached["dq"], (np.arange(T) == i) & mask[i].any())


@pytest.mark.parametrize(("name", "query_block"), [("exact", None), ("hf_eager_bf16", 4), ("flash_fp16", None)])
def test_a_query_that_sees_nothing(name, query_block):
    for ids in (IDS, np.full((B, T), -1)):
        got, blind = run(preset(name), ids=ids, query_block=query_block), ids[0] == -1
        assert (got["out"][0, blind] == 0).all()
        assert (got["lse"][0, :, blind] == -np.inf).all()
        for gradient in ("dq", "dk", "dv"):
            assert np.isfinite(got[gradient]).all()
            assert (got[gradient][0, blind] == 0).all()


@pytest.mark.parametrize("stray", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("name", "query_block"), [("exact", None), ("hf_eager_bf16", 4), ("flash_fp16", None)])
def test_what_padding_holds_reaches_nothing(name, query_block, stray):
    blank, strayed = ([np.where((IDS == -1)[..., None, None], fill, x) for x in inputs()[:4]] for fill in (0, stray))
    want, got = (run(preset(name), arrays=(*x, inputs()[4]), query_block=query_block) for x in (blank, strayed))
    for what in want:
        np.testing.assert_array_equal(got[what], want[what])


def test_large_logits_neither_overflow_nor_cancel():
    q, k, v, *weights = inputs()
    got = run(EXACT, arrays=(1000 * q, k, v, *weights))
    assert np.isfinite(got["out"]).all()
    first = got["out"][0, 0]  # it sees itself alone
    np.testing.assert_array_equal(first, np.repeat(v[0, 0], H // K, axis=0))


def test_by_blocks_no_array_has_a_place_for_every_pair_of_tokens():
    tokens, sizes = 64, set()

    def collect(jaxpr):
        for equation in jaxpr.eqns:
            sizes.update(variable.aval.size for variable in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                collect(inner)

    def loss(q, k, v):
        return attention(q, k, v, np.ones((1, tokens), int), EXACT, query_block=8)[0].sum()

    shape = jax.ShapeDtypeStruct((1, tokens, 1, 4), jnp.float64)
    collect(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1, 2)))(shape, shape, shape).jaxpr)
    assert max(sizes) == 8 * tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=(1, 8, K, D)), r"attention: .*got q \(1, 9, 4, 4\), k \(1, 8, 2, 4\)"),
        (dict(k=(1, T, 3, D), v=(1, T, 3, D)), "H be a multiple of K"),
        (dict(q=(T, H, D)), r"attention: expected q \[B, T, H, D\]"),
        (dict(ids=(1, 8)), r"document_ids \(1, 8\)"),
        (dict(query_block=0), "query_block: 0 queries at a time; give a positive number"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    shapes = dict(q=(B, T, H, D), k=(B, T, K, D), v=(B, T, K, D), ids=(B, T)) | change
    query_block = shapes.pop("query_block", None)
    q, k, v, ids = (np.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, ids.astype(int), EXACT, query_block=query_block)


def test_an_accumulator_cuts_the_running_sums_as_a_loop_does():
    """Of 70 keys, three steps: after each the sum is cut towards zero to 14 significant bits."""
    random = np.random.default_rng(5)
    q, k, v = (random.standard_normal((1, 70, 1, 64)).astype(np.float32) for _ in range(3))
    rounding = Rounding("float32", normalise="after_pv", accumulator=14)
    found = attention(*map(jnp.asarray, (q, k, v)), jnp.ones((1, 70), int), rounding, 0.125)[0][0, -1, 0]

    def cut(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x.astype(np.float32))
        return np.ldexp(np.trunc(mantissa * 2.0**14) / 2.0**14, exponent).astype(np.float32)

    def running(terms: np.ndarray) -> np.ndarray:
        total = np.zeros(terms.shape[1:], np.float32)
        for start in range(0, len(terms), 32):
            total = cut(total + terms[start : start + 32].sum(0, dtype=np.float32))
        return total

    logits = running(q[0, -1, 0][:, None] * k[0, :, 0].T) * np.float32(0.125)
    weights = np.exp(logits - logits.max())
    twin = running(weights[:, None] * v[0, :, 0]) / weights.sum()
    exact = attention(*map(jnp.asarray, (q, k, v)), jnp.ones((1, 70), int), preset("flash_fp32"), 0.125)[0][0, -1, 0]
    # Sums of float32 in another order may fall on the other side of a cut: one unit of 14 bits, in few places.
    assert np.mean(np.abs(found - twin) > 2.0**-20) < 0.1
    assert np.abs(found - twin).max() < np.abs(found - exact).max()
