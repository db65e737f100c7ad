"""The mask rule. The trainer states it only here; every engine lowers it.

`dense` and `flex` call `visible`. `sdpa` and `flash` do not: `make_plan` lowers the rule to segments for them.

    visible(q, k) = k <= q and document[q] != -1 and document[k] != -1
                    and (document[k] == document[q] or document[k] == 0)
                    and (window is None or q - k < window or (keep_anchor and document[k] == 0))

q and k are indices in storage order. Document 0 is the anchor, a prefix of the row. -1 is padding: it sees nothing and
nothing sees it, so its attention output is 0 and its log-sum-exp is -inf.

Some layers have a window (Mistral, Gemma, gpt-oss). There q and k are places: a token's place is its index among the
anchor and its own document. So a window hides the same tokens of a document wherever the document is in the row.
`keep_anchor` keeps the anchor visible beyond the window; the model was not trained with that. Places and indices put a
token's keys in the same order, so one rule serves layers with and without a window.

Legend: B batch · T tokens of a row.
"""

import torch
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.marks import ANCHOR, PADDING


def visible(
    document_q: Tensor,
    document_k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    window: int | None = None,
    keep_anchor: bool = False,
) -> Tensor:
    """Evaluate the rule elementwise, bool, on broadcastable integer tensors; with a window the indices are places."""
    same_or_anchor = (document_k == document_q) | (document_k == ANCHOR)
    seen = (index_k <= index_q) & (document_q != PADDING) & (document_k != PADDING) & same_or_anchor
    if window is None:
        return seen
    near = index_q - index_k < window
    return seen & (near | (document_k == ANCHOR) if keep_anchor else near)


def places(document_ids_BT: Tensor) -> Tensor:
    """Return each token's index among the anchor and its own document, int64 [B, T]; for padding, among padding."""
    sorted_BT, order_BT = document_ids_BT.sort(dim=1, stable=True)
    within_BT = torch.arange(sorted_BT.shape[1], device=sorted_BT.device) - torch.searchsorted(sorted_BT, sorted_BT)
    anchors_B1 = (document_ids_BT == ANCHOR).sum(1, keepdim=True)
    return torch.empty_like(order_BT).scatter_(1, order_BT, within_BT + anchors_B1 * (sorted_BT > ANCHOR))


def visible_BTT(document_ids_BT: Tensor, window: int | None = None, keep_anchor: bool = False) -> Tensor:
    """Materialise the rule as bool [B, T, T], queries first. For tests and tiny inputs only."""
    ids = document_ids_BT
    index = torch.arange(ids.shape[1], device=ids.device)[None] if window is None else places(ids)
    return visible(ids[:, :, None], ids[:, None, :], index[:, :, None], index[:, None, :], window, keep_anchor)


def check_document_ids(document_ids_BT: Tensor) -> None:
    """Refuse what is not a [B, T] integer tensor of -1, 0, 1.. whose anchor (0) is a prefix of its row. Raises
    UserError: naming the row and the index of the first offence.
    """
    kind = document_ids_BT.dtype
    if document_ids_BT.ndim != 2 or kind.is_floating_point or kind.is_complex or kind == torch.bool:
        raise UserError(
            f"document_ids: expected an integer tensor [batch, tokens], got {document_ids_BT.dtype} "
            f"{list(document_ids_BT.shape)}"
        )
    if document_ids_BT.numel() == 0:
        raise UserError(f"document_ids: empty, shape {list(document_ids_BT.shape)}; give at least one token")
    if (document_ids_BT < PADDING).any():
        raise UserError(
            f"document_ids: smallest value {int(document_ids_BT.min())}; use -1 for padding, 0 for the anchor, 1.. for "
            "documents"
        )
    is_anchor_BT = document_ids_BT == ANCHOR
    stray_BT = is_anchor_BT & (is_anchor_BT.cumprod(dim=1) == 0)
    if stray_BT.any():
        row, index = (int(x) for x in stray_BT.nonzero()[0])
        raise UserError(
            f"document_ids: row {row} has anchor id 0 at index {index}, after a document; the anchor is a prefix of "
            "the row, number documents from 1"
        )
