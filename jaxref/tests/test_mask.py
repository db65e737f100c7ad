"""The rule in numpy and in JAX against the rule in loops."""

from itertools import product

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxref.attention import _places
from jaxref.layout import lay_out
from jaxref.mask import live_pairs, places, visible_BQJ

# One length, so that JAX compiles once.
documents = st.builds(
    lambda anchor, ids, padding: np.array([0] * anchor + ids[: 8 - anchor - padding] + [-1] * padding),
    st.integers(0, 3),
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
    st.integers(0, 3),
)


@given(documents)
def test_the_rule_in_numpy_in_jax_and_in_loops(ids):
    expected = [
        [k <= q and ids[q] != -1 and ids[k] != -1 and (ids[k] == ids[q] or ids[k] == 0) for k in range(len(ids))]
        for q in range(len(ids))
    ]
    np.testing.assert_array_equal(visible_BQJ(ids[None])[0], expected)
    np.testing.assert_array_equal(visible_BQJ(jnp.asarray(ids)[None])[0], expected)
    assert live_pairs(ids[None]) == np.sum(expected)


@given(documents, st.integers(1, 8), st.booleans())
def test_a_window_in_numpy_and_in_loops(ids, window, keep_anchor):
    """A document's tokens and the anchor's, one after the other, as if nothing else were stored in the row."""
    expected = np.zeros((len(ids), len(ids)), bool)
    for q, document in enumerate(ids):
        own = [k for k in range(q + 1) if document != -1 and ids[k] in (0, document)]
        kept = [k for k in own if keep_anchor and ids[k] == 0]
        expected[q, own[-window:] + kept] = True
    np.testing.assert_array_equal(visible_BQJ(ids[None], None, None, window, keep_anchor)[0], expected)
    real = ids != -1
    np.testing.assert_array_equal(np.asarray(_places(jnp.asarray(ids)[None]))[0, real], places(ids[None])[0, real])


def test_slices_are_parts_of_the_whole():
    ids = lay_out([5, 4], "anchor", anchor=2, padding=2).document_ids[None].repeat(2, 0)
    ids[1, 3] = -1
    whole = visible_BQJ(ids)
    for q, k in product((None, slice(0, 4), slice(5, 12)), (None, slice(2, 3), slice(6, None))):
        np.testing.assert_array_equal(visible_BQJ(ids, q, k), whole[:, q or slice(None)][:, :, k or slice(None)])
