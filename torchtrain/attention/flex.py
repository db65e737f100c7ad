"""Engine `flex`: FlexAttention with a BlockMask built from the document boundaries, never by evaluating T x T.

`create_block_mask` evaluates the rule on every pair (32 s and 10 GiB at T = 32K); here a block of keys is classified by
the documents at its borders: nothing visible, all visible ("full": no mask is evaluated inside) or some.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim · Q, J blocks of queries, of keys.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from anchorline.errors import UserError
from torchtrain.attention.plan import AttentionPlan
from torchtrain.attention.rule import ANCHOR, PADDING, visible

BLOCK = 128


def make_block_mask(document_ids_BT: Tensor) -> BlockMask:
    """Lower document ids [B, T] to a BlockMask over T rounded up to a multiple of 128 (the rest counts as padding).

    A block pair is kept where some pair of it is visible, and full where all are. Both are exact where ids do not decrease
    along the row (padding aside), which is how rows are packed; ids in any other order keep a superset of the blocks and
    stay correct, because the rule itself is evaluated inside every block that is not full.
    """
    ids_BT = F.pad(document_ids_BT, (0, -document_ids_BT.shape[1] % BLOCK), value=PADDING)
    B, T = ids_BT.shape
    blocks = ids_BT.view(B, T // BLOCK, BLOCK)

    # The documents of a block lie between its first and last id. Padding takes no part: first > last where all is padding.
    real = blocks != PADDING
    some_real_BQ, all_real_BQ = real.any(-1), real.all(-1)
    last_BQ = blocks.amax(-1)
    first_BQ = _min_where(real, blocks)
    has_anchor_BQ = first_BQ == ANCHOR
    one_document_BQ = all_real_BQ & (_min_where(blocks > ANCHOR, blocks) >= last_BQ)  # with or without anchor tokens

    block_Q = torch.arange(T // BLOCK, device=ids_BT.device)
    before_QJ = block_Q[None, :] < block_Q[:, None]
    on_diagonal_QJ = block_Q[None, :] == block_Q[:, None]

    overlap_BQJ = (first_BQ[:, None, :] <= last_BQ[:, :, None]) & (first_BQ[:, :, None] <= last_BQ[:, None, :])
    reach_BQJ = (overlap_BQJ | has_anchor_BQ[:, None, :]) & some_real_BQ[:, :, None] & some_real_BQ[:, None, :]
    some_BQJ = reach_BQJ & (before_QJ | on_diagonal_QJ)

    to_anchor_BQJ = (all_real_BQ & (last_BQ == ANCHOR))[:, None, :]
    single_BQ = one_document_BQ & ~has_anchor_BQ  # queries of one document, which may also see its anchor's keys
    to_own_BQJ = single_BQ[:, :, None] & one_document_BQ[:, None, :] & (last_BQ[:, :, None] == last_BQ[:, None, :])
    full_BQJ = before_QJ & all_real_BQ[:, :, None] & (to_anchor_BQJ | to_own_BQJ)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return visible(ids_BT[b, q], ids_BT[b, k], q, k)

    return BlockMask.from_kv_blocks(
        *_as_indices(some_BQJ & ~full_BQJ), *_as_indices(full_BQJ), BLOCK_SIZE=BLOCK, mask_mod=mask_mod
    )


def attend_flex(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Attend with compiled FlexAttention.

    Returns out [B, T, H, D], and on CUDA the detached float32 log-sum-exp [B, H, T] (None on a CPU).

    Raises:
        UserError: gradients are needed on a device other than CUDA, where FlexAttention only has a forward pass.
    """
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BTHD, k_BTKD, v_BTKD))
    if needs_grad and not q_BTHD.is_cuda:
        raise UserError(f"attention flex: no backward pass on {q_BTHD.device.type}; choose sdpa, or torch.no_grad()")
    T = q_BTHD.shape[1]
    padded = [F.pad(x, (0, 0, 0, 0, 0, -T % BLOCK)).transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD)]
    options: dict[str, Any] = {"block_mask": plan.block_mask, "scale": scale, "enable_gqa": True}
    if not q_BTHD.is_cuda:  # the compiled CPU kernel gives no log-sum-exp
        return _compiled_flex_attention()(*padded, **options)[:, :, :T].transpose(1, 2), None
    out_BHTD, aux = _compiled_flex_attention()(*padded, **options, return_aux=AuxRequest(lse=True))
    # What a row that sees nothing gets for a log-sum-exp is left to FlexAttention's kernels; the rule says -inf.
    lse_BHT = aux.lse[:, :, :T].detach().masked_fill((plan.document_ids_BT == PADDING)[:, None], float("-inf"))
    return out_BHTD[:, :, :T].transpose(1, 2), lse_BHT


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _min_where(chosen: Tensor, blocks: Tensor) -> Tensor:
    """Smallest chosen id of each block; more than any id where none is chosen."""
    return blocks.masked_fill(~chosen, torch.iinfo(blocks.dtype).max).amin(-1)


def _as_indices(kept_BQJ: Tensor) -> tuple[Tensor, Tensor]:
    """Bool blocks -> (number kept [B, 1, Q], their indices first [B, 1, Q, J]), as BlockMask stores them."""
    count = kept_BQJ.sum(-1, dtype=torch.int32)
    indices = kept_BQJ.int().argsort(dim=-1, descending=True, stable=True).int()
    return count[:, None], indices[:, None]
