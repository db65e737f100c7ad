"""Make a row's `document_ids` and `position_ids` from its documents' lengths and its variant, and draw its mask.

Nothing in the model imports this: a first reader may skip it.

Legend: T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anchorline.errors import UserError
from jaxref.mask import ANCHOR, PADDING, visible_BQJ

VARIANTS = ("full", "intra", "intra_reset", "anchor")


@dataclass(frozen=True)
class RowLayout:
    """One packed row under a variant: two arrays of the contract, and what each stored token is.

    `source[i]` is the place token i would have with documents stored whole and in order; only full+interleave moves
    tokens. `labelled[i]` says whether token i predicts the next one of its document. `turns` is the order of the merge,
    a document's index from 0 for each piece; without interleaving, document by document.
    """

    document_ids: np.ndarray  # int64 [T]
    position_ids: np.ndarray  # int64 [T]
    source: np.ndarray  # int64 [T]
    labelled: np.ndarray  # bool [T]
    turns: np.ndarray  # int64 [pieces]


def lay_out(
    lengths: Sequence[int],
    variant: str,
    anchor: int = 1,
    padding: int = 0,
    tag: int = 0,
    chunks: int = 4,
    seed: int = 0,
    turns: Sequence[int] | None = None,
    targets: Sequence[Sequence[bool]] | None = None,
) -> RowLayout:
    """Lay out one row: `anchor` prefix tokens, documents of these lengths opened by `tag` tokens each, `padding`
    tokens.

    Every variant has the prefix: it is document 0 under `anchor` and part of document 1 in the others.

    Under `+interleave` each document is cut into `chunks` pieces of near equal length (the longer ones first, one token
    each if it has fewer), the tag in front of the first, and the pieces are merged in a random order that keeps each
    document's own, every such merge as likely as any other; tokens take the positions of the merged row.
    `full+interleave` stores the merged row; the others store documents whole. `intra_reset+interleave` is
    `intra_reset`: its positions count within each document.

    lengths: tokens of each document without its tag, all positive.
    variant: `full`, `intra`, `intra_reset` or `anchor`, each with `+interleave` or without.
    anchor: tokens of the prefix.
    padding: tokens after the last document.
    tag: tokens that open each document; part of it like any other.
    chunks: pieces a document is cut into.
    seed: of the merge order.
    turns: the merge order itself, as `RowLayout.turns`, instead of one drawn from `seed`.
    targets: of each document, which of its tokens may be predicted; None: all. Its first token never is.

    Raises UserError: an unknown variant, a length or a number of chunks that is not positive, turns of other pieces.
    """
    base, *extras = variant.split("+")
    if base not in VARIANTS or extras not in ([], ["interleave"]):
        raise UserError(f"variant {variant!r}; choose {', '.join(VARIANTS)}, each with +interleave or without")
    if min(lengths, default=0) < 1 or min(anchor, padding, tag) < 0 or chunks < 1:
        raise UserError(
            f"lengths {list(lengths)}, anchor {anchor}, padding {padding}, tag {tag}, chunks {chunks}: lengths and "
            "chunks are positive, the others not negative"
        )

    documents = np.repeat(np.arange(1, len(lengths) + 1), [tag + n for n in lengths])
    ids = np.concatenate([np.full(anchor, ANCHOR), documents, np.full(padding, PADDING)]).astype(np.int64)
    T = len(ids)
    # Pieces by document, each the indices of its tokens.
    starts: list[int] = (anchor + np.cumsum([0, *(tag + n for n in lengths)])).tolist()
    pieces = [
        _pieces(np.arange(start, stop), tag, min(chunks, n))
        for start, stop, n in zip(starts[:-1], starts[1:], lengths, strict=True)
    ]
    names = np.repeat(np.arange(len(lengths)), [len(own) for own in pieces])
    order = _order(names, seed, turns) if extras else names
    queues = [iter(own) for own in pieces]
    merged = np.concatenate([np.arange(anchor), *(next(queues[turn]) for turn in order), np.arange(starts[-1], T)])
    positions = np.empty(T, dtype=np.int64)
    positions[merged] = np.arange(T)
    labelled = np.zeros(T, dtype=bool)
    for start, n, own in zip(starts, lengths, targets or [[True] * n for n in lengths], strict=False):
        labelled[start + tag : start + tag + n - 1] = own[1:]

    if base != "anchor":
        ids[ids == ANCHOR] = 1
    if base == "full":
        ids[ids > ANCHOR] = 1
        return RowLayout(ids[merged], np.arange(T), merged, labelled[merged], order)
    if base == "intra_reset":
        for document in np.unique(ids):
            positions[ids == document] = np.arange((ids == document).sum())
    return RowLayout(ids, positions, np.arange(T), labelled, order)


def draw(document_ids: np.ndarray, seen: str = "■", unseen: str = "·") -> str:
    """Draw the rule for one row of ids [T]: a line per query, a column per key, headed by the keys' documents."""
    names = [{ANCHOR: "A", PADDING: "-"}.get(d, _NAMES[(d - 1) % len(_NAMES)]) for d in map(int, document_ids)]
    mask = visible_BQJ(np.asarray(document_ids)[None])[0]
    rows = [f"{name} " + " ".join(seen if x else unseen for x in row) for name, row in zip(names, mask, strict=True)]
    return "\n".join(["  " + " ".join(names), *rows])


_NAMES = "123456789abcdefghijklmnopqrstuvwxyz"


def _order(names: np.ndarray, seed: int, turns: Sequence[int] | None) -> np.ndarray:
    if turns is None:
        return np.random.default_rng(seed).permutation(names)
    if sorted(turns) != names.tolist():
        raise UserError(f"turns: {list(turns)} does not order the pieces {names.tolist()}")
    return np.asarray(turns)


def _pieces(tokens: np.ndarray, tag: int, count: int) -> list[np.ndarray]:
    parts: list[np.ndarray] = np.array_split(tokens[tag:], count)
    return [np.concatenate([tokens[:tag], parts[0]]), *parts[1:]]
