"""FlexAttention's BlockMask, built from the boundaries of the documents. The T x T mask is never computed.

`create_block_mask` evaluates the rule on every pair (32 s and 10 GiB at T = 32K). Here the first
and last document of each block decide whether its pairs are all hidden, all visible ("full": the kernel evaluates no
mask inside) or mixed.

Legend: B batch · T tokens of a row · P the same, rounded up to whole blocks · Q, J blocks of queries, of keys.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from torchtrain.attention.rule import places, visible
from torchtrain.marks import ANCHOR, PADDING

BLOCK = 128


def make_block_mask(document_ids_BT: Tensor, window: int | None = None, keep_anchor: bool = False) -> BlockMask:
    """Lower document ids [B, T] to a BlockMask over T rounded up to a multiple of 128 (the rest counts as padding).

    A block pair is kept if some pair in it is visible, and full if all are. Both are exact if ids do not decrease along
    the row (padding aside), as in packed rows. Ids in any other order, and blocks of several documents under a window,
    keep more blocks than needed. The result stays correct, because the rule itself is evaluated inside every block that
    is not full.
    """
    ids_BP = F.pad(document_ids_BT, (0, -document_ids_BT.shape[1] % BLOCK), value=PADDING)
    B, P = ids_BP.shape
    blocks = ids_BP.view(B, P // BLOCK, BLOCK)

    # The documents of a block lie between its first and last id. Padding is left out: a block of nothing else has
    # first > last.
    real = blocks != PADDING
    some_real_BQ, all_real_BQ = real.any(-1), real.all(-1)
    last_BQ = blocks.amax(-1)
    first_BQ = _min_where(real, blocks)
    has_anchor_BQ = first_BQ == ANCHOR
    one_document_BQ = all_real_BQ & (_min_where(blocks > ANCHOR, blocks) >= last_BQ)  # with or without anchor tokens

    block_Q = torch.arange(P // BLOCK, device=ids_BP.device)
    before_QJ = block_Q[None, :] < block_Q[:, None]
    on_diagonal_QJ = block_Q[None, :] == block_Q[:, None]

    overlap_BQJ = (first_BQ[:, None, :] <= last_BQ[:, :, None]) & (first_BQ[:, :, None] <= last_BQ[:, None, :])
    reach_BQJ = (overlap_BQJ | has_anchor_BQ[:, None, :]) & some_real_BQ[:, :, None] & some_real_BQ[:, None, :]
    some_BQJ = reach_BQJ & (before_QJ | on_diagonal_QJ)

    to_anchor_B1J = (all_real_BQ & (last_BQ == ANCHOR))[:, None, :]
    single_BQ = one_document_BQ & ~has_anchor_BQ  # queries of one document, which may also see its anchor's keys
    to_own_BQJ = single_BQ[:, :, None] & one_document_BQ[:, None, :] & (last_BQ[:, :, None] == last_BQ[:, None, :])
    full_BQJ = before_QJ & all_real_BQ[:, :, None] & (to_anchor_B1J | to_own_BQJ)

    index_BP = torch.arange(P, device=ids_BP.device).expand(B, P)
    if window is not None:
        index_BP = places(ids_BP)
        place_blocks = index_BP.view(blocks.shape)
        low_BQ, high_BQ = _min_where(real, place_blocks), place_blocks.masked_fill(~real, -1).amax(-1)
        reached_BQJ = low_BQ[:, :, None] - high_BQ[:, None, :] < window
        whole_BQJ = high_BQ[:, :, None] - low_BQ[:, None, :] < window
        if keep_anchor:
            reached_BQJ, whole_BQJ = reached_BQJ | has_anchor_BQ[:, None, :], whole_BQJ | to_anchor_B1J
        some_BQJ, full_BQJ = some_BQJ & reached_BQJ, full_BQJ & whole_BQJ

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(ids_BP[b, q], ids_BP[b, k], index_BP[b, q], index_BP[b, k], window, keep_anchor)

    return BlockMask.from_kv_blocks(
        *_as_indices(some_BQJ & ~full_BQJ), *_as_indices(full_BQJ), BLOCK_SIZE=BLOCK, mask_mod=mask_mod
    )


def _min_where(chosen: Tensor, blocks: Tensor) -> Tensor:
    """Smallest chosen id of each block; more than any id where none is chosen."""
    return blocks.masked_fill(~chosen, torch.iinfo(blocks.dtype).max).amin(-1)


def _as_indices(kept_BQJ: Tensor) -> tuple[Tensor, Tensor]:
    """Bool blocks -> (number kept [B, 1, Q], their indices first [B, 1, Q, J]), as BlockMask stores them."""
    count = kept_BQJ.sum(-1, dtype=torch.int32)
    indices = kept_BQJ.int().argsort(dim=-1, descending=True, stable=True).int()
    return count[:, None], indices[:, None]
