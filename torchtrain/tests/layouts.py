"""Random and hand-picked packings for tests: document_ids as the rule allows them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

# One row each: anchor?, documents of one token, several anchors, padding inside and at the end, documents apart, only
# padding.
NAMED_ROWS: dict[str, list[int]] = {
    "full": [1] * 12,
    "intra": [1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3],
    "anchor": [0, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3],
    "anchor of three": [0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3],
    "one-token documents": [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 9],
    "padding at the end": [0, 1, 1, 1, 2, 2, 2, 2, -1, -1, -1, -1],
    "no anchor, padding": [1, 1, 1, 2, 2, 2, 2, 2, 2, -1, -1, -1],
    "padding in the middle": [0, 1, 1, -1, 1, 2, -1, -1, 2, 2, 3, -1],
    "documents apart": [0, 2, 2, 1, 1, 2, 2, 1, 3, 1, 3, 2],
    "anchor only": [0] * 12,
    "padding only": [-1] * 12,
}


def named_batch() -> Tensor:
    """All named rows in one batch, int64 [11, 12]."""
    return torch.tensor(list(NAMED_ROWS.values()))


@st.composite
def document_ids(draw: st.DrawFn, max_rows: int = 3, max_tokens: int = 40, packed: bool = False) -> Tensor:
    """Random [B, T] ids: anchor of 0..4 tokens, then documents and padding; in any order, or as a packer stores
    them.
    """
    tokens = draw(st.integers(1, max_tokens))
    rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        anchor = draw(st.integers(0, min(4, tokens)))
        rest = draw(st.lists(st.integers(-1, 5).filter(bool), min_size=tokens - anchor, max_size=tokens - anchor))
        rows.append([0] * anchor + (sorted(rest, key=lambda d: (d == -1, d)) if packed else rest))
    return torch.tensor(rows)
