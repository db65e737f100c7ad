"""The five arrays, written out by hand for each variant, and the laws of interleaving."""

from collections import Counter

import numpy as np
import pytest

from torchtrain.config import PackConfig
from torchtrain.data.rows import SpanTokens, _split, build_row

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
        ("full+tag", [1] * 11 + [-1], list(range(12))),
        ("intra+tag", [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, -1], list(range(12))),
        ("intra_reset+tag", [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, -1], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 0]),
        ("anchor+tag", [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, -1], list(range(12))),
    ],
)
def test_variants_differ_in_documents_and_positions_only(variant, document_ids, position_ids):
    """Neither the anchor nor a tag is a target; a tag belongs to its document."""
    check(
        row_of(variant, TAGGED, T=12, anchor=(5, 6, 8)),
        input_ids=[5, 6, 8, 1, 2, 10, 11, 12, 3, 20, 21, 7],
        shift_labels=[X, X, X, X, X, 11, 12, X, X, 21, X, X],
        domain_ids=[-1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, -1],
        document_ids=document_ids,
        position_ids=position_ids,
    )


def test_cross_document_targets_are_the_next_token_of_the_row():
    """Each target counts for a domain, the anchor's for that of the document that it predicts."""
    row = row_of("anchor", T=9, anchor=(5, 9), cross_document_targets=True)
    check(row, shift_labels=[9, 10, 11, 12, 20, 21, X, X, X], domain_ids=[0, 0, 0, 0, 0, 1, 1, -1, -1])


def test_cross_document_targets_leave_tags_alone():
    row = row_of("full+tag", TAGGED, T=10, cross_document_targets=True)
    check(row, shift_labels=[X, X, X, 11, 12, X, X, 21, X, X])


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
