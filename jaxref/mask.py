"""The mask rule: elementwise, as a matrix, and as a count of the pairs that it leaves.

    visible(q, k) = k <= q and document[q] != -1 and document[k] != -1
                    and (document[k] == document[q] or document[k] == 0)

q and k are indices in storage order; document 0 is the anchor, a prefix of the row; -1 is padding, which neither sees
nor is seen. There is no other mask: a variant is a choice of `document_ids` and `position_ids`.
`jaxref.layout` makes that choice; it and the count may be skipped at first.

Legend: B batch · T tokens of a row · Q queries and J keys of a slice.
"""

from typing import Any

import numpy as np

ANCHOR, PADDING = 0, -1


def visible(document_q: Any, document_k: Any, index_q: Any, index_k: Any) -> Any:
    """The rule, elementwise on broadcastable integer arrays of numpy or JAX."""
    own_or_anchor = (document_k == document_q) | (document_k == ANCHOR)
    return (index_k <= index_q) & (document_q != PADDING) & (document_k != PADDING) & own_or_anchor


def visible_BQJ(document_ids_BT: Any, q_slice: slice | None = None, k_slice: slice | None = None) -> Any:
    """Materialise the rule for a slice of queries and a slice of keys.

    Args:
        document_ids_BT: integers [B, T], numpy or JAX.
        q_slice, k_slice: which queries and keys; None is all.

    Returns bool [B, Q, J].
    """
    tokens: int = document_ids_BT.shape[1]
    index_T = np.arange(tokens)
    q, k = q_slice or slice(None), k_slice or slice(None)
    return visible(
        document_ids_BT[:, q, None], document_ids_BT[:, None, k], index_T[q][None, :, None], index_T[k][None, None, :]
    )


def live_pairs(document_ids_BT: np.ndarray) -> int:
    """Count visible pairs of the batch: A(A+1)/2 + sum over documents of n(n+1)/2 + A n, row by row."""
    pairs = 0
    for row in np.asarray(document_ids_BT):
        anchors = int((row == ANCHOR).sum())
        pairs += anchors * (anchors + 1) // 2
        for document in np.unique(row[row > ANCHOR]):
            n = int((row == document).sum())
            pairs += n * (n + 1) // 2 + anchors * n
    return pairs
