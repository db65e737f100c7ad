"""The five arrays, written out by hand for each variant, and the laws of interleaving."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrain.config import PackConfig
from torchtrain.data.rows import SpanTokens, _split, build_row
from torchtrain.run.describe import describe_variant

X = -100
ANCHOR, PAD = 9, 7
SPANS = [SpanTokens(np.array([10, 11, 12]), 0, []), SpanTokens(np.array([20, 21]), 1, [])]
TAGGED = [SpanTokens(np.array([10, 11, 12]), 0, [1, 2]), SpanTokens(np.array([20, 21]), 1, [3])]


def row_of(variant, spans=SPANS, T=8, anchor=(ANCHOR,), seed=0, **settings):
    pack = PackConfig(sequence_length=T, variant=variant, **settings)
    return build_row(spans, pack, list(anchor), PAD, np.random.default_rng(seed))


def check(row, **expected):
    assert {name: row[name].tolist() for name in expected} == expected
    assert all(array.dtype == np.int64 for array in row.values())
    assert list(row) == ["input_ids", "position_ids", "document_ids", "shift_labels", "domain_ids"]


@pytest.mark.parametrize(
    ("variant", "document_ids", "position_ids"),
    [
        ("full", [1, 1, 1, 1, 1, 1, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ("intra", [1, 1, 1, 1, 2, 2, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]),
        ("intra_reset", [1, 1, 1, 1, 2, 2, -1, -1], [0, 1, 2, 3, 0, 1, 0, 1]),
        ("anchor", [0, 1, 1, 1, 2, 2, -1, -1], [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_base_variants_differ_in_documents_and_positions_only(variant, document_ids, position_ids):
    check(
        row_of(variant),
        input_ids=[9, 10, 11, 12, 20, 21, 7, 7],
        shift_labels=[X, 11, 12, X, 21, X, X, X],
        domain_ids=[-1, 0, 0, 0, 1, 1, -1, -1],
        document_ids=document_ids,
        position_ids=position_ids,
    )


@pytest.mark.parametrize(
    ("variant", "document_ids", "position_ids"),
    [
        ("full+tag", [1] * 9 + [-1], list(range(10))),
        ("intra+tag", [1, 1, 1, 1, 1, 1, 2, 2, 2, -1], list(range(10))),
        ("intra_reset+tag", [1, 1, 1, 1, 1, 1, 2, 2, 2, -1], [0, 1, 2, 3, 4, 5, 0, 1, 2, 0]),
        ("anchor+tag", [0, 1, 1, 1, 1, 1, 2, 2, 2, -1], list(range(10))),
    ],
)
def test_tags_belong_to_their_document_and_are_no_targets(variant, document_ids, position_ids):
    check(
        row_of(variant, TAGGED, T=10),
        input_ids=[9, 1, 2, 10, 11, 12, 3, 20, 21, 7],
        shift_labels=[X, X, X, 11, 12, X, X, 21, X, X],
        domain_ids=[-1, 0, 0, 0, 0, 0, 1, 1, 1, -1],
        document_ids=document_ids,
        position_ids=position_ids,
    )


@pytest.mark.parametrize(
    ("variant", "document_ids"),
    [
        ("full", [1, 1, 1, 1, 1, 1, 1, 1, -1]),
        ("intra", [1, 1, 1, 1, 1, 1, 2, 2, -1]),
        ("intra_reset", [1, 1, 1, 1, 1, 1, 2, 2, -1]),
        ("anchor", [0, 0, 0, 1, 1, 1, 2, 2, -1]),
    ],
)
def test_an_anchor_of_several_tokens_predicts_nothing_within_itself(variant, document_ids):
    check(
        row_of(variant, anchor=(5, 6, 8), T=9),
        input_ids=[5, 6, 8, 10, 11, 12, 20, 21, 7],
        document_ids=document_ids,
        shift_labels=[X, X, X, 11, 12, X, 21, X, X],
    )
    crossing = row_of(variant, anchor=(5, 6, 8), T=9, cross_document_targets=True)
    check(crossing, shift_labels=[6, 8, 10, 11, 12, 20, 21, X, X])


def test_cross_document_targets_are_the_next_token_of_the_row():
    """Each target counts for a domain, the anchor's for that of the document that it predicts."""
    row = row_of("anchor", cross_document_targets=True)
    check(row, shift_labels=[10, 11, 12, 20, 21, X, X, X], domain_ids=[0, 0, 0, 0, 1, 1, -1, -1])


def test_cross_document_targets_leave_tags_alone():
    row = row_of("full+tag", TAGGED, T=10, cross_document_targets=True)
    check(row, shift_labels=[X, X, X, 11, 12, X, X, 21, X, X])


# Two documents of three and two tokens cut into two chunks each: a|b and c|d, merged as the row's generator says.
MERGES = {
    (0, 0, 1, 1): [0, 1, 2, 3, 4, 5, 6, 7],
    (0, 1, 0, 1): [0, 1, 2, 4, 3, 5, 6, 7],
    (0, 1, 1, 0): [0, 1, 2, 5, 3, 4, 6, 7],
    (1, 0, 0, 1): [0, 2, 3, 4, 1, 5, 6, 7],
    (1, 0, 1, 0): [0, 2, 3, 5, 1, 4, 6, 7],
    (1, 1, 0, 0): [0, 3, 4, 5, 1, 2, 6, 7],
}


def test_interleaved_positions_are_those_of_each_possible_merge():
    seen = {tuple(row_of("anchor+interleave", chunks=2, seed=seed)["position_ids"]) for seed in range(60)}
    assert seen == {tuple(positions) for positions in MERGES.values()}


def test_interleaving_changes_nothing_where_positions_restart_and_says_so():
    plain = row_of("intra_reset", TAGGED, T=10)
    interleaved = row_of("intra_reset+interleave", TAGGED, T=10, chunks=2)
    for name, array in plain.items():
        np.testing.assert_array_equal(array, interleaved[name])
    assert "changes nothing" in describe_variant(PackConfig(sequence_length=10, variant="intra_reset+interleave"))


rows = st.tuples(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=6),  # tokens and tag of each span
    st.integers(1, 3),  # anchor
    st.integers(0, 5),  # padding
    st.integers(2, 5),  # chunks
    st.integers(0, 1000),  # seed
)


@given(rows)
def test_laws_of_interleaving(drawn):
    sizes, anchor, padding, chunks, seed = drawn
    ids = iter(range(100, 1000))
    spans = [SpanTokens(np.array([next(ids) for _ in range(n)]), d, [50 + d] * tag) for d, (n, tag) in enumerate(sizes)]
    T = max(anchor + sum(n + tag for n, tag in sizes) + padding, 2)
    kwargs = {"T": T, "anchor": [9] * anchor, "chunks": chunks, "seed": seed}
    row = row_of("anchor+tag+interleave", spans, **kwargs)
    positions = row["position_ids"]
    assert sorted(positions) == list(range(T))
    assert positions[:anchor].tolist() == list(range(anchor))
    used = T - padding if row["document_ids"][-1] == -1 else T
    np.testing.assert_array_equal(positions[used:], np.arange(used, T))
    for number, (n, tag) in enumerate(sizes, start=1):
        own = positions[row["document_ids"] == number]
        assert (np.diff(own) > 0).all()
        # The tag and the first chunk are one piece; a cut can only stand where two chunks of near equal length meet.
        cuts = np.flatnonzero(np.diff(own) > 1) + 1 - tag
        pieces = min(chunks, n)
        allowed = {sum(n // pieces + (i < n % pieces) for i in range(k)) for k in range(1, pieces)}
        assert set(cuts.tolist()) <= allowed
    # Full attention stores what the others only number: sorting by position gives its row.
    full = row_of("full+tag+interleave", spans, **kwargs)
    for name in ("input_ids", "shift_labels", "domain_ids"):
        np.testing.assert_array_equal(full[name], row[name][np.argsort(positions)])
    # Each token still predicts the next one of its own document.
    has_target = full["shift_labels"] != X
    np.testing.assert_array_equal(full["shift_labels"][has_target], full["input_ids"][has_target] + 1)
    assert has_target.sum() == sum(n - 1 for n, _ in sizes)


def test_random_split_points_are_every_set_of_points_alike():
    """Five tokens in three pieces: six sets of two points; and the pieces are all that the two ways differ in."""
    pack = PackConfig(sequence_length=5, variant="full+interleave", chunks=3, split="random")
    counts = Counter()
    for seed in range(3000):
        pieces = _split(np.arange(5), pack, np.random.default_rng(seed))
        assert np.concatenate(pieces).tolist() == [0, 1, 2, 3, 4]
        counts[tuple(len(piece) for piece in pieces)] += 1
    assert set(counts) == {(1, 1, 3), (1, 3, 1), (3, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)}
    # 500 of each are expected; six standard deviations of a binomial.
    assert all(abs(count - 500) < 6 * (3000 * 5 / 36) ** 0.5 for count in counts.values())
    assert [len(piece) for piece in _split(np.arange(2), pack, np.random.default_rng(0))] == [1, 1]
    even = pack.model_copy(update={"split": "even"})
    assert [piece.tolist() for piece in _split(np.arange(5), even, None)] == [[0, 1], [2, 3], [4]]


def authors_row(lengths, seed=0):
    """Return the merged row as (span, token within it) of every token."""
    spans = [SpanTokens(np.arange(10_000 * n, 10_000 * n + length), n, []) for n, length in enumerate(lengths, 1)]
    pack = PackConfig(sequence_length=1 + sum(lengths), variant="full+interleave", split="authors")
    ids = build_row(spans, pack, [1], 0, np.random.default_rng(seed))["input_ids"][1:]
    assert sorted(ids) == sorted(np.concatenate([tokens for tokens, *_ in spans]))  # no token twice or lost
    return ids // 10_000, ids % 10_000


def test_the_authors_split_documents_of_64_to_2048_tokens_alone():
    """A document that is split is seen to be where others lie between its pieces."""
    split = set()
    for seed in range(60):
        span, token = authors_row([63, 64, 2048, 2049, 500], seed)
        for number in range(1, 6):
            own = np.flatnonzero(span == number)
            assert (np.diff(token[own]) == 1).all()
            if (np.diff(own) > 1).any():
                split.add(number)
    assert split == {2, 3, 5}


def test_the_authors_rule_has_no_chunks():
    with pytest.raises(ValueError, match="split authors makes 2 or 3 pieces and does not take chunks"):
        PackConfig(sequence_length=41, split="authors", chunks=3)
