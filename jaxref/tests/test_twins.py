"""Two facts of the design: rows that differ in what is stored where, and compute the same.

Legend: T tokens of a row · H heads · D head_dim.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxref.attention import attention
from jaxref.layout import lay_out
from jaxref.rope import cos_sin, inverse_frequencies, rotate
from jaxref.rope_spec import RopeSpec
from jaxref.rounding import preset

H, D = 2, 8
EXACT = preset("exact")
U = 2.0**-53
LENGTHS = [7, 4, 9]


def attend(qkv_3THD: np.ndarray, document_ids: np.ndarray, position_ids: np.ndarray) -> np.ndarray:
    """Rotate and attend: output [T, H, D] and log-sum-exp [T, H, 1] side by side."""
    return np.asarray(_attend(qkv_3THD, document_ids, position_ids))


@jax.jit
def _attend(qkv_3THD: jax.Array, document_ids: jax.Array, position_ids: jax.Array) -> jax.Array:
    q, k, v = qkv_3THD[:, None]
    tables = cos_sin(position_ids[None], *inverse_frequencies(RopeSpec(D, 1e4)), EXACT)
    q, k = rotate(q, *tables, EXACT, "q_rotated"), rotate(k, *tables, EXACT, "k_rotated")
    out, lse = attention(q, k, v, document_ids[None], EXACT)
    return jnp.concatenate([out[0], lse[0].T[..., None]], axis=-1)


def sums_in_another_order(qkv_3THD: np.ndarray) -> float:
    """How far two evaluations of one row of attention may be apart when only the order of sums differs.

    With m the largest |q| |k| / sqrt(D): a rotation errs by 5 units of |x| (faithful cos and sin, two products, a sum),
    a logit by d = (D + 11) m, so p = exp(logit - max) / sum by 2 d (logit and max) + 4 (a difference, exp, a quotient)
    + T (the sum), relative, and the sum of p v by T more. The log-sum-exp errs by d + T + 4 and a rounding of its own
    size. Both evaluations may.
    """
    q, k, v = qkv_3THD
    T = len(q)
    m = np.linalg.norm(q, axis=-1).max() * np.linalg.norm(k, axis=-1).max() / D**0.5
    d = (D + 11) * m
    return 2 * U * max((2 * d + 4 + 2 * T) * np.abs(v).max(), d + T + 4 + m + np.log(T))


def tokens(T: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(3, T, H, D))


def assert_near(got: np.ndarray, want: np.ndarray, bound: float) -> None:
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    assert np.abs(got[finite] - want[finite]).max() <= bound


@pytest.mark.parametrize("base", ["intra", "anchor"])
@pytest.mark.parametrize("anchor", [1, 3])
def test_interleaved_chunks_need_no_storage_of_their_own(base, anchor):
    """Documents stored whole with the positions of the merged row compute what the merged row computes, permuted."""
    whole = lay_out(LENGTHS, f"{base}+interleave", anchor=anchor, padding=2, chunks=3, seed=1)
    merged = np.argsort(whole.position_ids)
    assert (np.diff(whole.document_ids[merged]) < 0).any()  # something is interleaved
    x = tokens(len(merged))
    expected = attend(x[:, merged], whole.document_ids[merged], np.arange(len(merged)))
    assert_near(attend(x, whole.document_ids, whole.position_ids)[merged], expected, sums_in_another_order(x))


@pytest.mark.parametrize("anchor", [1, 2])
def test_a_shared_anchor_is_a_copy_in_front_of_each_document(anchor):
    """The anchor sees itself alone, so its keys and values are the same for all."""
    shared = lay_out(LENGTHS, "anchor", anchor=anchor)
    sources = [[*range(anchor), *np.flatnonzero(shared.document_ids == document)] for document in (1, 2, 3)]
    ids, source = np.repeat([1, 2, 3], [len(own) for own in sources]), np.concatenate(sources)
    x = tokens(len(shared.document_ids))
    got = attend(x[:, source], ids, shared.position_ids[source])
    want = attend(x, shared.document_ids, shared.position_ids)[source]
    assert_near(got, want, sums_in_another_order(x[:, source]))
