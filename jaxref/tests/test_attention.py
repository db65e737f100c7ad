"""Attention against mpmath written in loops: output, log-sum-exp and gradients; blocks, roundings, isolation, padding."""

from functools import cache

import jax
import jax.numpy as jnp
import ml_dtypes
import mpmath
import numpy as np
import pytest

from jaxref.attention import attention
from jaxref.mask import visible
from jaxref.rounding import Rounding, preset

B, T, H, K, D = 1, 9, 4, 2, 4
IDS = np.array([[0, 0, 1, 1, 1, 2, 2, -1, -1]])
EXACT, FP32 = preset("exact"), preset("fp32")
NAMES = ("out", "lse", "dq", "dk", "dv")
UNIT_RATIO = 2.0**-29  # unit roundoff of float64 over that of float32


def assert_float64_of(got64, got32, truth) -> None:
    """Errors of one computation scale with the unit roundoff, so float32's own error, scaled, bounds float64's.

    The factor 2 and one rounding of the truth's own size are the project's rule for any candidate.
    """
    got64, got32, truth = (np.asarray(x, np.float64) for x in (got64, got32, truth))
    np.testing.assert_array_equal(np.isinf(got64), np.isinf(truth))
    finite = np.isfinite(truth)
    error64, error32 = np.abs(got64 - truth)[finite].max(), np.abs(got32 - truth)[finite].max()
    assert error32 > 0
    assert error64 <= 2 * error32 * UNIT_RATIO + 2.0**-53 * np.abs(truth[finite]).max()


@cache
def inputs() -> tuple[np.ndarray, ...]:
    """q, k, v and weights on the output and on the log-sum-exp, all exact in float32."""
    rng = np.random.default_rng(0)
    shapes = ((B, T, H, D), (B, T, K, D), (B, T, K, D), (B, T, H, D), (B, H, T))
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def run(rounding: Rounding, ids=IDS, arrays=None, **options) -> dict[str, np.ndarray]:
    """Output, log-sum-exp, and the gradients of their weighted sum."""
    q, k, v, weight, lse_weight = (jnp.asarray(x, rounding.dtype) for x in (arrays or inputs()))
    (out, lse), pull = jax.vjp(lambda q, k, v: attention(q, k, v, ids, rounding, **options), q, k, v)
    return dict(zip(NAMES, map(np.asarray, (out, lse, *pull((weight, lse_weight)))), strict=True))


@cache
def truth(scale: float | None = None) -> dict[str, np.ndarray]:
    """The same in 200 bits, a query, a head and a key at a time; gradients by the closed form of the softmax."""
    with mpmath.workprec(200):
        q, k, v, w, lse_w = (np.vectorize(lambda x: mpmath.mpf(float(x)), otypes=[object])(x)[0] for x in inputs())
        factor = 1 / mpmath.sqrt(D) if scale is None else mpmath.mpf(scale)
        out, dq, dk, dv = (np.full_like(x, mpmath.mpf(0)) for x in (q, q, k, v))
        lse = np.full((H, T), -np.inf)
        for h in range(H):
            kv = h // (H // K)
            for i in range(T):
                seen = [j for j in range(T) if j <= i and IDS[0, i] != -1 and IDS[0, j] in (0, IDS[0, i])]
                if not seen:
                    continue
                weights = [mpmath.exp(factor * (q[i, h] @ k[j, kv])) for j in seen]
                total = sum(weights)
                lse[h, i] = float(mpmath.log(total))
                probs = [x / total for x in weights]
                out[i, h] = sum(p * v[j, kv] for p, j in zip(probs, seen, strict=True))
                for p, j in zip(probs, seen, strict=True):
                    dv[j, kv] += p * w[i, h]
                    d_logit = p * (w[i, h] @ v[j, kv] - w[i, h] @ out[i, h] + lse_w[h, i])
                    dq[i, h] += factor * d_logit * k[j, kv]
                    dk[j, kv] += factor * d_logit * q[i, h]
        return {name: x[None].astype(np.float64) for name, x in zip(NAMES, (out, lse, dq, dk, dv), strict=True)}


@pytest.mark.parametrize("normalise", ["before_pv", "after_pv"])
@pytest.mark.parametrize("block", [None, 1, 4, 9, 20])
@pytest.mark.parametrize("name", NAMES)
def test_exact_is_attention_written_in_loops(name, block, normalise):
    got64, got32 = (run(r.replace(normalise=normalise), block=block)[name] for r in (EXACT, FP32))
    assert got64.dtype == np.float64
    assert got32.dtype == np.float32
    assert_float64_of(got64, got32, truth()[name])


def test_scale():
    got64, got32 = (run(r, scale=0.3) for r in (EXACT, FP32))
    for name in NAMES:
        assert_float64_of(got64[name], got32[name], truth(0.3)[name])


@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_the_dense_computation(name):
    """Only the order of sums differs, so dense float32's error bounds the difference by the same rule."""
    assert_float64_of(run(EXACT, block=4)[name], run(FP32)[name], run(EXACT)[name])


@pytest.mark.parametrize("name", ["hf_eager_bf16", "flash_bf16", "hf_eager_fp16"])
def test_blocks_round_as_dense_does(name):
    """In a float64 carrier the order of sums is too small to move a rounding to half precision."""
    dense, blocks = (run(preset(name).replace(carrier="float64"), block=block) for block in (None, 4))
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
    mask, seen = visible(IDS)[0], IDS[0] != -1

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


@pytest.mark.parametrize("block", [None, 4])
def test_no_gradient_from_what_is_invisible(block):
    q, k, v, *_ = map(jnp.float64, inputs())
    _, pull = jax.vjp(lambda q, k, v: attention(q, k, v, IDS, EXACT, block=block), q, k, v)
    mask = visible(IDS)[0]
    for i in range(T):
        direction = jnp.zeros((B, T, H, D)).at[0, i].set(1.0), jnp.zeros((B, H, T)).at[0, :, i].set(1.0)
        dq, dk, dv = ((np.asarray(x)[0] != 0).any((1, 2)) for x in pull(direction))
        np.testing.assert_array_equal(dk, mask[i] if mask[i].sum() > 1 else mask[i] & dk)
        np.testing.assert_array_equal(dv, mask[i])
        np.testing.assert_array_equal(dq, (np.arange(T) == i) & mask[i].any())


@pytest.mark.parametrize("name", ["exact", "hf_eager_bf16", "flash_fp16"])
@pytest.mark.parametrize("block", [None, 4])
def test_a_query_that_sees_nothing(block, name):
    for ids in (IDS, np.full((B, T), -1)):
        got, blind = run(preset(name), ids=ids, block=block), ids[0] == -1
        assert (got["out"][0, blind] == 0).all()
        assert (got["lse"][0, :, blind] == -np.inf).all()
        for gradient in ("dq", "dk", "dv"):
            assert np.isfinite(got[gradient]).all()
            assert (got[gradient][0, blind] == 0).all()


def test_large_logits_neither_overflow_nor_cancel():
    q, k, v, *weights = inputs()
    got = run(EXACT, arrays=(1000 * q, k, v, *weights))
    assert np.isfinite(got["out"]).all()
    first = got["out"][0, 0]  # it sees itself alone
    np.testing.assert_array_equal(first, np.repeat(v[0, 0], H // K, axis=0))


def test_by_blocks_no_array_has_a_row_and_a_column_for_every_token():
    shapes = set()

    def collect(jaxpr):
        for equation in jaxpr.eqns:
            shapes.update(tuple(v.aval.shape) for v in equation.outvars)
            for inner in jax.core.jaxprs_in_params(equation.params):
                collect(inner)

    def loss(q, k, v):
        return attention(q, k, v, np.ones((1, 64), int), EXACT, block=8)[0].sum()

    shape = jax.ShapeDtypeStruct((1, 64, 2, 4), jnp.float64)
    collect(jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1, 2)))(shape, shape, shape).jaxpr)
    assert (1, 2, 1, 8, 64) in shapes
    assert not [shape for shape in shapes if shape.count(64) > 1 or (8, 8) == shape[:2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(k=(1, 8, K, D)), r"attention: .*got q \(1, 9, 4, 4\), k \(1, 8, 2, 4\)"),
        (dict(k=(1, T, 3, D), v=(1, T, 3, D)), "H be a multiple of K"),
        (dict(q=(T, H, D)), r"attention: expected q \[B, T, H, D\]"),
        (dict(ids=(1, 8)), r"document_ids \(1, 8\)"),
        (dict(block=0), "block: 0 queries at a time; give a positive number"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change, message):
    shapes = dict(q=(B, T, H, D), k=(B, T, K, D), v=(B, T, K, D), ids=(B, T)) | change
    block = shapes.pop("block", None)
    q, k, v, ids = (np.zeros(shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, ids.astype(int), EXACT, block=block)
