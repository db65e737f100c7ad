"""Masks drawn by hand, and the two arrays of every variant."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxref.layout import VARIANTS, draw, lay_out

FULL = """
  1 1 1 1 1 1 - -
1 ■ · · · · · · ·
1 ■ ■ · · · · · ·
1 ■ ■ ■ · · · · ·
1 ■ ■ ■ ■ · · · ·
1 ■ ■ ■ ■ ■ · · ·
1 ■ ■ ■ ■ ■ ■ · ·
- · · · · · · · ·
- · · · · · · · ·
"""
INTRA = """
  1 1 1 1 2 2 2 3
1 ■ · · · · · · ·
1 ■ ■ · · · · · ·
1 ■ ■ ■ · · · · ·
1 ■ ■ ■ ■ · · · ·
2 · · · · ■ · · ·
2 · · · · ■ ■ · ·
2 · · · · ■ ■ ■ ·
3 · · · · · · · ■
"""
ANCHOR = """
  A A 1 1 2 2 2 3
A ■ · · · · · · ·
A ■ ■ · · · · · ·
1 ■ ■ ■ · · · · ·
1 ■ ■ ■ ■ · · · ·
2 ■ ■ · · ■ · · ·
2 ■ ■ · · ■ ■ · ·
2 ■ ■ · · ■ ■ ■ ·
3 ■ ■ · · · · · ■
"""
PADDED = """
  A 1 1 2 - -
A ■ · · · · ·
1 ■ ■ · · · ·
1 ■ ■ ■ · · ·
2 ■ · · ■ · ·
- · · · · · ·
- · · · · · ·
"""


@pytest.mark.parametrize(
    ("arguments", "drawing", "positions"),
    [
        (dict(lengths=[2, 3], variant="full", padding=2), FULL, range(8)),
        (dict(lengths=[2, 3, 1], variant="intra", anchor=2), INTRA, range(8)),
        (dict(lengths=[2, 3, 1], variant="intra_reset", anchor=2), INTRA, [0, 1, 2, 3, 0, 1, 2, 0]),
        (dict(lengths=[2, 3, 1], variant="anchor", anchor=2), ANCHOR, range(8)),
        (dict(lengths=[2, 1], variant="anchor", padding=2), PADDED, range(6)),
        # a|b and c|d with the turns 2 1 1 2: A A, c, a, b, d; d is the last of document 2.
        (
            dict(lengths=[2, 3, 1], variant="anchor+interleave", anchor=2, chunks=2, turns=[1, 0, 2, 0, 1]),
            ANCHOR,
            [0, 1, 4, 6, 2, 3, 7, 5],
        ),
        (dict(lengths=[1, 2], variant="anchor", tag=1, anchor=1), None, range(6)),
        # The tag, one token, stays in front of the first of its document's pieces.
        (
            dict(lengths=[1, 2], variant="anchor+interleave", tag=1, anchor=1, chunks=2, turns=[1, 0, 1]),
            None,
            [0, 3, 4, 1, 2, 5],
        ),
    ],
)
def test_variants_by_hand(arguments, drawing, positions):
    row = lay_out(**arguments)
    np.testing.assert_array_equal(row.position_ids, positions)
    np.testing.assert_array_equal(row.source, range(len(row.source)))
    if drawing is None:
        np.testing.assert_array_equal(row.document_ids, [0, 1, 1, 2, 2, 2])
    else:
        assert draw(row.document_ids) == drawing.strip("\n")


def test_full_and_interleave_stores_the_merged_row():
    row = lay_out([2, 3], "full+interleave", anchor=1, padding=1, chunks=2, turns=[1, 0, 1, 0])
    np.testing.assert_array_equal(row.source, [0, 3, 4, 1, 5, 2, 6])
    np.testing.assert_array_equal(row.document_ids, [1] * 6 + [-1])
    np.testing.assert_array_equal(row.position_ids, range(7))


def test_intra_reset_and_interleave_is_intra_reset():
    plain, interleaved = (lay_out([4, 5], f"intra_reset{x}", padding=2) for x in ("", "+interleave"))
    np.testing.assert_array_equal(plain.position_ids, interleaved.position_ids)
    np.testing.assert_array_equal(plain.document_ids, interleaved.document_ids)


def test_a_merge_is_drawn_from_its_seed_and_can_be_given_back():
    drawn = [lay_out([8, 9, 3], "anchor+interleave", seed=seed) for seed in range(20)]
    assert len({tuple(row.turns) for row in drawn}) > 15
    for seed, row in enumerate(drawn):
        for again in (dict(seed=seed), dict(turns=row.turns.tolist())):
            np.testing.assert_array_equal(
                lay_out([8, 9, 3], "anchor+interleave", **again).position_ids, row.position_ids
            )
    # The documented generator, so that another packer can make the same order.
    names = np.repeat([0, 1, 2], [4, 4, 3])
    np.testing.assert_array_equal(drawn[7].turns, np.random.Generator(np.random.PCG64(7)).permutation(names))
    np.testing.assert_array_equal(lay_out([8, 9, 3], "anchor").turns, names)


rows = st.fixed_dictionaries(
    dict(
        lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
        anchor=st.integers(0, 3),
        padding=st.integers(0, 3),
        tag=st.integers(0, 2),
        chunks=st.integers(1, 5),
        seed=st.integers(0, 99),
    )
)


@given(rows, st.sampled_from([base + extra for base in VARIANTS for extra in ("", "+interleave")]))
def test_laws_of_layouts(arguments, variant):
    row = lay_out(variant=variant, **arguments)
    T = arguments["anchor"] + sum(arguments["lengths"]) + arguments["tag"] * len(arguments["lengths"])
    T += arguments["padding"]
    assert row.document_ids.dtype == row.position_ids.dtype == np.int64
    assert row.document_ids.shape == row.position_ids.shape == row.source.shape == (T,)
    assert sorted(row.source) == list(range(T))
    if not variant.startswith("intra_reset"):
        assert sorted(row.position_ids) == list(range(T))
    for document in np.unique(row.document_ids):
        positions = row.position_ids[row.document_ids == document]
        assert (np.diff(positions) > 0).all()  # a document keeps its own order
    assert (row.document_ids == -1).sum() == arguments["padding"]


@given(rows)
def test_interleaving_is_a_permutation_of_the_reordered_row(arguments):
    """Stored whole with merged positions, or stored merged: token by token the same documents at the same positions."""
    whole, merged = (lay_out(variant=f"{base}+interleave", **arguments) for base in ("intra", "full"))
    np.testing.assert_array_equal(whole.position_ids[merged.source], merged.position_ids)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lengths=[2], variant="anchor+tag"), "variant 'anchor.tag'; choose full, intra, intra_reset, anchor"),
        (dict(lengths=[2], variant="causal"), "variant 'causal'; choose"),
        (dict(lengths=[2, 0], variant="full"), r"lengths \[2, 0\], anchor 1"),
        (dict(lengths=[], variant="full"), r"lengths \[\], anchor 1"),
        (dict(lengths=[2], variant="full", padding=-1), "padding -1"),
        (dict(lengths=[2], variant="full", chunks=0), "chunks 0"),
        (
            dict(lengths=[2, 1], variant="anchor+interleave", turns=[0, 0, 0]),
            r"turns: \[0, 0, 0\] does not order the pieces",
        ),
    ],
)
def test_impossible_rows_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lay_out(**arguments)
