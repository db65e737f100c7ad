"""From the spans of one row to its five arrays: the only place where a mask variant is chosen.

A row holds the anchor, then the spans one after another, each opened by its tag, then padding.

Shapes: T tokens of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchtrain.config import PackConfig

IGNORED, PADDING, ANCHOR = -100, -1, 0


class Segment(NamedTuple):
    """A span with its tokens: int [span], the index of its domain, and its tag ([] without)."""

    tokens: np.ndarray
    domain: int
    tag: Sequence[int]


def build_row(
    segments: Sequence[Segment], pack: PackConfig, anchor: Sequence[int], pad_id: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """Return `input_ids`, `position_ids`, `document_ids`, `shift_labels`, `domain_ids` of one row, each int64 [T].

    Mask rule: a query sees a key at or before it (in storage) of its own document, or of document 0 (the anchor).

    full: all document 1. intra: documents 1..n. intra_reset: the same, positions restart in each. anchor: as intra, but
    the anchor is document 0, seen by all (in the other three it belongs to document 1). The four differ in nothing
    else.

    A token predicts the next one of its span; anchor, tags and the last token of a span predict nothing, and padding
    neither. Under `cross_document_targets` anchor and last tokens predict what stands next in the row; tags still
    neither predict nor are predicted.

    +interleave: every span is cut into `pack.chunks` pieces of near equal length (one token each if it has fewer), its
    tag stays with the first, and all pieces are merged in a random order that keeps each span's own. Under full the row
    is stored as merged; under intra and anchor the spans stay whole and take the positions of the merged row, which
    computes the same. Under intra_reset positions count within each document whatever lies between, so it changes
    nothing.

    Args:
        segments: at least one; with anchor and tags no more than T tokens.
        pack: variant, T, chunks, targets.
        anchor: the tokens that open the row.
        pad_id: fills the rest of `input_ids`; the rest is document -1, domain -1, label -100. Its positions count on
            (in intra_reset from 0).
        random: the row's own generator, for +interleave.
    """
    T = pack.sequence_length
    input_ids = np.full(T, pad_id, dtype=np.int64)
    document = np.full(T, PADDING, dtype=np.int64)
    domain_ids = np.full(T, -1, dtype=np.int64)
    is_tag = np.zeros(T, dtype=bool)
    end = len(anchor)
    input_ids[:end] = anchor
    document[:end] = ANCHOR
    for number, (tokens, domain, tag) in enumerate(segments, start=1):
        start, text, end = end, end + len(tag), end + len(tag) + len(tokens)
        assert end <= T, "the spans do not fit the row"
        input_ids[start:text] = tag
        input_ids[text:end] = tokens
        document[start:end] = number
        domain_ids[start:end] = domain
        is_tag[start:text] = True

    shift_labels = np.full(T, IGNORED, dtype=np.int64)
    has_target = (document[1:] != PADDING) & ~is_tag[:-1] & ~is_tag[1:]
    if not pack.cross_document_targets:
        has_target &= (document[:-1] == document[1:]) & (document[:-1] != ANCHOR)
    shift_labels[:-1][has_target] = input_ids[1:][has_target]

    row = {
        "input_ids": input_ids,
        "position_ids": np.arange(T),
        "document_ids": _document_ids(document, pack.base_variant),
        "shift_labels": shift_labels,
        "domain_ids": domain_ids,
    }
    if pack.base_variant == "intra_reset":
        row["position_ids"] = _restart_positions(row["document_ids"])
    elif pack.interleave:
        merged = _merge(segments, len(anchor), T, pack.chunks, random)
        if pack.base_variant == "full":
            row = {name: array if name == "position_ids" else array[merged] for name, array in row.items()}
        else:
            row["position_ids"][merged] = np.arange(T)
    return row


def describe(pack: PackConfig) -> str:
    """Return one sentence or two on what a row of this variant is, for people."""
    parts = {
        "full": "every token sees all tokens before it, across documents",
        "intra": "a token sees its own document; positions run through the row",
        "intra_reset": "a token sees its own document; positions restart in each document",
        "anchor": "a token sees its own document and the anchor; positions run through the row",
    }
    text = f"{pack.variant}: {parts[pack.base_variant]}"
    if pack.tag:
        text += "; a tag that is never a target opens each document"
    if pack.interleave and pack.base_variant == "intra_reset":
        text += "; +interleave changes nothing here, because positions restart in each document: this is intra_reset"
    elif pack.interleave:
        text += f"; documents are cut into {pack.chunks} chunks that take the positions of a random merge"
    return text


def _document_ids(document: np.ndarray, base_variant: str) -> np.ndarray:
    if base_variant == "full":
        return np.where(document == PADDING, PADDING, 1)
    if base_variant == "anchor":
        return document
    return np.where(document == ANCHOR, 1, document)


def _restart_positions(document_ids: np.ndarray) -> np.ndarray:
    index = np.arange(len(document_ids))
    begins = np.concatenate([[True], document_ids[1:] != document_ids[:-1]])
    return index - np.maximum.accumulate(np.where(begins, index, 0))


def _merge(segments: Sequence[Segment], anchor: int, T: int, chunks: int, random: np.random.Generator) -> np.ndarray:
    """Return the storage index of each place of the merged row, int64 [T]: anchor first, padding last."""
    pieces, start = [], anchor
    for tokens, _, tag in segments:
        text = start + len(tag)
        end = text + len(tokens)
        first, *others = np.array_split(np.arange(text, end), min(chunks, len(tokens)))
        pieces.append(iter([np.concatenate([np.arange(start, text), first]), *others]))
        start = end
    # A shuffled list that names each span once a piece: every merge that keeps the spans' own order is equally likely.
    counts = [min(chunks, len(segment.tokens)) for segment in segments]
    turns = random.permutation(np.repeat(np.arange(len(segments)), counts))
    return np.concatenate([np.arange(anchor), *(next(pieces[turn]) for turn in turns), np.arange(start, T)])
