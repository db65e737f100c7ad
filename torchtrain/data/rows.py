"""From the spans of one row to its five arrays: the only place where a mask variant is chosen.

A row holds the anchor, then the spans one after another, each opened by its tag, then padding.

Legend: T tokens of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchtrain.config import PackConfig
from torchtrain.marks import ANCHOR, IGNORED, PADDING


class SpanTokens(NamedTuple):
    """A span with its tokens: int [span] of any width, the index of its domain, and its tag ([] without)."""

    tokens: np.ndarray
    domain: int
    tag: Sequence[int]


def build_row(
    spans: Sequence[SpanTokens],
    pack: PackConfig,
    anchor_ids: Sequence[int],
    pad_id: int,
    random: np.random.Generator | None,
) -> dict[str, np.ndarray]:
    """Return `input_ids`, `position_ids`, `document_ids`, `shift_labels`, `domain_ids` of one row, each int64 [T].

    What a token sees follows from `document_ids` alone, by `torchtrain.attention.rule`.

    full: all document 1. intra: documents 1..n. intra_reset: the same, positions restart in each. anchor: as intra, but
    the anchor is document 0, seen by all (in the other three it belongs to document 1). The four differ in nothing
    else.

    A token predicts the next one of its span; anchor, tags and the last token of a span predict nothing, and padding
    neither. Under `cross_document_targets` anchor and last tokens predict what stands next in the row; tags still
    neither predict nor are predicted.

    +interleave: every span is cut into `pack.chunks` pieces, or the authors' 2 or 3 (one token each if it has fewer),
    of near equal length or at random points, as `pack.split` says. Its tag stays with the first, and all pieces are
    merged in a random order that keeps each span's own. Under full the row is stored as merged; under intra and anchor
    the spans stay whole and take the positions of the merged row, which computes the same. Under intra_reset positions
    count within each document whatever lies between, so it changes nothing.

    Args:
        spans: at least one; with anchor and tags no more than T tokens.
        pack: variant, T, chunks, targets.
        anchor_ids: the tokens that open the row.
        pad_id: fills the rest of `input_ids`; the rest is document -1, domain -1, label -100. Its positions count on
            (in intra_reset from 0).
        random: the row's own generator, for +interleave; None without.
    """
    T = pack.sequence_length
    # Not filled beforehand: at 64K tokens most of the time is in writing these.
    input_ids_T, document_ids_T, domain_ids_T, shift_labels_T = (np.empty(T, dtype=np.int64) for _ in range(4))
    base, end = pack.base_variant, len(anchor_ids)
    input_ids_T[:end] = anchor_ids
    document_ids_T[:end] = ANCHOR if base == "anchor" else 1
    domain_ids_T[:end] = -1
    shift_labels_T[:end] = IGNORED
    for number, (tokens, domain, tag) in enumerate(spans, start=1):
        start, text, end = end, end + len(tag), end + len(tag) + len(tokens)
        assert end <= T, "the spans do not fit the row"
        input_ids_T[start:text] = tag
        input_ids_T[text:end] = tokens
        document_ids_T[start:end] = 1 if base == "full" else number
        domain_ids_T[start:end] = domain
        shift_labels_T[start:text] = IGNORED
        shift_labels_T[text : end - 1] = input_ids_T[text + 1 : end]
        shift_labels_T[end - 1] = IGNORED
    input_ids_T[end:], document_ids_T[end:], domain_ids_T[end:], shift_labels_T[end:] = pad_id, PADDING, -1, IGNORED
    if pack.cross_document_targets:
        _predict_across(shift_labels_T, input_ids_T, spans, len(anchor_ids))

    row = {
        "input_ids": input_ids_T,
        "position_ids": np.arange(T),
        "document_ids": document_ids_T,
        "shift_labels": shift_labels_T,
        "domain_ids": domain_ids_T,
    }
    if base == "intra_reset":
        row["position_ids"] = _restart_positions(row["document_ids"])
    elif pack.interleave:
        assert random is not None
        merged_T = _merge(spans, len(anchor_ids), T, pack, random)
        if base == "full":
            row = {name: array if name == "position_ids" else array[merged_T] for name, array in row.items()}
        else:
            row["position_ids"][merged_T] = np.arange(T)
    return row


def _predict_across(
    shift_labels_T: np.ndarray, input_ids_T: np.ndarray, spans: Sequence[SpanTokens], anchor_tokens: int
) -> None:
    """Let the anchor and the last token of each span predict what stands next, unless that opens a tag or padding."""
    last = anchor_tokens - 1
    shift_labels_T[: max(last, 0)] = input_ids_T[1:anchor_tokens]
    for tokens, _, tag in spans:
        if last >= 0 and not len(tag):
            shift_labels_T[last] = input_ids_T[last + 1]
        last += len(tag) + len(tokens)


def _restart_positions(document_ids_T: np.ndarray) -> np.ndarray:
    index_T = np.arange(len(document_ids_T))
    begins_T = np.concatenate([[True], document_ids_T[1:] != document_ids_T[:-1]])
    return index_T - np.maximum.accumulate(np.where(begins_T, index_T, 0))


def _merge(
    spans: Sequence[SpanTokens], anchor_tokens: int, T: int, pack: PackConfig, random: np.random.Generator
) -> np.ndarray:
    """Return the storage index of each token of the merged row, int64 [T]: anchor first, padding last."""
    pieces, counts, start = [], [], anchor_tokens
    for tokens, _, tag in spans:
        text = start + len(tag)
        end = text + len(tokens)
        first, *others = _split(np.arange(text, end), pack, random)
        counts.append(1 + len(others))
        pieces.append(iter([np.concatenate([np.arange(start, text), first]), *others]))
        start = end
    # A shuffled list that names each span once a piece: every merge that keeps the spans' own order is equally likely.
    turns = random.permutation(np.repeat(np.arange(len(spans)), counts))
    return np.concatenate([np.arange(anchor_tokens), *(next(pieces[turn]) for turn in turns), np.arange(start, T)])


def _split(index: np.ndarray, pack: PackConfig, random: np.random.Generator) -> list[np.ndarray]:
    """Cut a span's storage indices into its pieces; at random points, each set of them is equally likely.

    The authors' code cuts documents into 2 or 3 pieces. It was not at hand: that both are equally likely, drawn for
    each span, at random points as the paper has them (arXiv 2411.13476), is what `authors` takes it to do.
    """
    pieces = min(pack.chunks if pack.split != "authors" else int(random.integers(2, 4)), len(index))
    if pack.split == "even":
        return np.array_split(index, pieces)
    return np.split(index, 1 + np.sort(random.choice(len(index) - 1, pieces - 1, replace=False)))
