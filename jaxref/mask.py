"""The mask rule: elementwise, as a matrix, and as a count of the pairs that it leaves.

    visible(q, k) = k <= q and document[q] != -1 and document[k] != -1
                    and (document[k] == document[q] or document[k] == 0)
                    and (window is None or q - k < window or (keep_anchor and document[k] == 0))

q and k are indices in storage order. Document 0 is the anchor, a prefix of the row. -1 is padding: it sees nothing and
nothing sees it. There is no other mask: a variant is a choice of `document_ids` and `position_ids`, which
`jaxref.layout` makes.

Some layers have a window (Mistral, Gemma, gpt-oss). There q and k are places: a token's place is its index among the
anchor and its own document. Places and indices put a token's keys in the same order, so one rule serves layers with
and without a window. `keep_anchor` keeps the anchor visible beyond the window.

Legend: B batch · T tokens of a row · Q queries and J keys of a slice.
"""

from typing import Any

import numpy as np

ANCHOR, PADDING = 0, -1


def visible(
    document_q: Any, document_k: Any, index_q: Any, index_k: Any, window: int | None = None, keep_anchor: bool = False
) -> Any:
    """The rule, elementwise on broadcastable integer arrays of numpy or JAX; with a window the indices are places."""
    own_or_anchor = (document_k == document_q) | (document_k == ANCHOR)
    seen = (index_k <= index_q) & (document_q != PADDING) & (document_k != PADDING) & own_or_anchor
    if window is None:
        return seen
    return seen & ((index_q - index_k < window) | (keep_anchor & (document_k == ANCHOR)))


def places(document_ids_BT: Any) -> np.ndarray:
    """Return each token's index among the anchor and its own document, int [B, T]; for padding, among padding."""
    document_BT: Any = np.asarray(document_ids_BT)
    places_BT = np.zeros(document_BT.shape, int)
    for place_T, row in zip(places_BT, document_BT, strict=True):
        for document in np.unique(row):
            own = row == document
            place_T[own] = np.arange(own.sum()) + (0 if document <= ANCHOR else (row == ANCHOR).sum())
    return places_BT


def visible_BQJ(
    document_ids_BT: Any,
    q_slice: slice | None = None,
    k_slice: slice | None = None,
    window: int | None = None,
    keep_anchor: bool = False,
) -> Any:
    """Materialise the rule for a slice of queries and a slice of keys.

    document_ids_BT: integers [B, T], numpy or JAX.
    q_slice, k_slice: which queries and keys; None is all.
    window, keep_anchor: see the rule.

    Returns bool [B, Q, J].
    """
    tokens: int = document_ids_BT.shape[1]
    index = np.arange(tokens)[None] if window is None else places(document_ids_BT)
    q, k = q_slice or slice(None), k_slice or slice(None)
    documents = document_ids_BT[:, q, None], document_ids_BT[:, None, k]
    return visible(*documents, index[:, q, None], index[:, None, k], window, keep_anchor)


def live_pairs(document_ids_BT: np.ndarray) -> int:
    """Count visible pairs of the batch: A(A+1)/2 + sum over documents of n(n+1)/2 + A n, row by row.

    It counts layers without a window.
    """
    pairs = 0
    for row in np.asarray(document_ids_BT):
        anchors = int((row == ANCHOR).sum())
        pairs += anchors * (anchors + 1) // 2
        for document in np.unique(row[row > ANCHOR]):
            n = int((row == document).sum())
            pairs += n * (n + 1) // 2 + anchors * n
    return pairs
