"""From the spans of one row to its five arrays: the only place where a mask variant is chosen.

A row holds the anchor, then the spans one after another, each opened by its tag, then padding.

Legend: T tokens of a row.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from torchtrain.config import PackConfig
from torchtrain.marks import ANCHOR, IGNORED, PADDING

# The authors' interleaving: the lengths of documents that are split, and the least distance of two cuts.
AUTHORS_SHORTEST, AUTHORS_LONGEST, _AUTHORS_APART = 64, 2048, 12


class SpanTokens(NamedTuple):
    """A span with its tokens: int [span] of any width, the index of its domain, and its tag ([] without).

    `targets`, bool [span], says which of the tokens may be predicted; None: all. Or float32: what the loss of each
    counts, 0 where it may not be predicted.
    """

    tokens: np.ndarray
    domain: int
    tag: Sequence[int]
    targets: np.ndarray | None = None


def build_row(
    spans: Sequence[SpanTokens],
    pack: PackConfig,
    anchor_ids: Sequence[int],
    pad_id: int,
    random: np.random.Generator | None,
) -> dict[str, np.ndarray]:
    """Return `input_ids`, `position_ids`, `document_ids`, `shift_labels`, `domain_ids` of one row, each int64 [T]; and
    `weights`, float32 [T], of the loss of what each token predicts, where targets have weights.

    What a token sees follows from `document_ids` alone, by `torchtrain.attention.rule`.

    full: all document 1. intra: documents 1..n. intra_reset: the same, positions restart in each. anchor: as intra, but
    the anchor is document 0, seen by all; in the other three those tokens belong to document 1. The four differ in
    nothing else.

    A token predicts the next one of its span, if that is a target. The anchor, tags, the last token of a span and
    padding predict nothing.
    Under `cross_document_targets` anchor and last tokens predict the next token of the row, and the anchor has the
    first span's domain. Tags still neither predict nor are predicted.

    +interleave: every span is cut into pieces, as `pack.split` says. `even` and `random` make `pack.chunks` pieces (one
    token each if it has fewer), of near equal length or at random points, and each merge that keeps the spans' own
    order is equally likely. `authors` follows the authors' code (`_split_as_authors`, `_turns_as_authors`). A span's
    tag stays with its first piece. Under full the row is stored as merged; under intra and anchor the spans stay whole
    and take the positions of the merged row, which computes the same. Under intra_reset positions
    restart in each document, so interleaving changes nothing.

    spans: at least one; with anchor and tags no more than T tokens.
    pad_id: fills the rest of `input_ids`; the rest is document -1, domain -1, label -100. Its positions count on (in
        intra_reset from 0).
    random: the row's own generator, for +interleave; None without.
    """
    T = pack.sequence_length
    # Not filled beforehand: at 64K tokens most of the time is in writing these.
    input_ids_T, document_ids_T, domain_ids_T, shift_labels_T = (np.empty(T, dtype=np.int64) for _ in range(4))
    base, end = pack.base_variant, len(anchor_ids)
    input_ids_T[:end] = anchor_ids
    document_ids_T[:end] = ANCHOR if base.has_anchor else 1
    domain_ids_T[:end] = spans[0].domain if pack.cross_document_targets else -1
    shift_labels_T[:end] = IGNORED
    has_weights = any(targets is not None and targets.dtype == np.float32 for *_, targets in spans)
    weights_T = np.ones(T, dtype=np.float32) if has_weights else None
    for number, (tokens, domain, tag, targets) in enumerate(spans, start=1):
        start, text, end = end, end + len(tag), end + len(tag) + len(tokens)
        assert end <= T, "the spans do not fit the row"
        input_ids_T[start:text] = tag
        input_ids_T[text:end] = tokens
        document_ids_T[start:end] = number if base.separates else 1
        domain_ids_T[start:end] = domain
        shift_labels_T[start:text] = IGNORED
        shift_labels_T[text : end - 1] = input_ids_T[text + 1 : end]
        shift_labels_T[end - 1] = IGNORED
        if targets is not None:
            shift_labels_T[text : end - 1][targets[1:] == 0] = IGNORED
            if weights_T is not None:
                weights_T[text : end - 1] = targets[1:]
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
    if weights_T is not None:
        row["weights"] = weights_T
    if base.restarts:
        row["position_ids"] = _restart_positions(row["document_ids"])
    elif pack.interleave:
        assert random is not None
        merged_T = _merge(spans, len(anchor_ids), T, pack, random)
        if base.separates:
            row["position_ids"][merged_T] = np.arange(T)
        else:
            row = {name: array if name == "position_ids" else array[merged_T] for name, array in row.items()}
    return row


def _predict_across(
    shift_labels_T: np.ndarray, input_ids_T: np.ndarray, spans: Sequence[SpanTokens], anchor_tokens: int
) -> None:
    """Let the anchor and the last token of each span predict the next token, unless a tag or padding begins there."""
    last = anchor_tokens - 1
    shift_labels_T[: max(last, 0)] = input_ids_T[1:anchor_tokens]
    for tokens, _, tag, _ in spans:
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
    for tokens, _, tag, _ in spans:
        text = start + len(tag)
        end = text + len(tokens)
        cut = _split_as_authors if pack.split == "authors" else _split
        first, *others = cut(np.arange(text, end), pack, random)
        counts.append(1 + len(others))
        pieces.append(iter([np.concatenate([np.arange(start, text), first]), *others]))
        start = end
    # Names each span once a piece. Shuffled, every merge that keeps the spans' own order is equally likely.
    owners = np.repeat(np.arange(len(spans)), counts)
    turns = _turns_as_authors(owners, counts, random) if pack.split == "authors" else random.permutation(owners)
    return np.concatenate([np.arange(anchor_tokens), *(next(pieces[turn]) for turn in turns), np.arange(start, T)])


def _split(index: np.ndarray, pack: PackConfig, random: np.random.Generator) -> list[np.ndarray]:
    """Cut a span's storage indices into its pieces; at random points, each set of them is equally likely."""
    pieces = min(pack.chunks, len(index))
    if pack.split == "even":
        return np.array_split(index, pieces)
    return np.split(index, 1 + np.sort(random.choice(len(index) - 1, pieces - 1, replace=False)))


def _split_as_authors(index: np.ndarray, pack: PackConfig, random: np.random.Generator) -> list[np.ndarray]:
    """Cut a span of 64 to 2,048 tokens into 2 or 3 pieces within its middle 60 per cent; leave any other span whole.

    As `split_shuffle_join` of the authors' train.py intends, which cuts the row instead, and is never called.
    """
    if not AUTHORS_SHORTEST <= len(index) <= AUTHORS_LONGEST:
        return [index]
    low, high = int(0.2 * len(index)), int(0.8 * len(index))
    if random.integers(2):
        return np.split(index, [random.integers(low, high)])
    first = random.integers(low, high - _AUTHORS_APART, endpoint=True)
    second = random.integers(min(first + _AUTHORS_APART, high - 1), high, endpoint=True)
    return np.split(index, [first, second])


def _turns_as_authors(owners: np.ndarray, counts: Sequence[int], random: np.random.Generator) -> np.ndarray:
    """Return the span of each merged piece: a span's piece k is at base + k exp(u), base and u uniform in [0, 1)."""
    base, step = random.random(len(counts)), np.exp(random.random(len(counts)))
    number = np.concatenate([np.arange(count) for count in counts])
    return owners[np.argsort(base[owners] + number * step[owners], kind="stable")]
