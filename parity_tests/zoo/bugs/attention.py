"""Bugs of the forward pass: masks, heads, softmax and what reaches an attention engine."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from parity_tests.zoo import Bug, bug, plain
from parity_tests.zoo.patch import around, attention, documents, every_engine, method
from torchtrain.attention.block_mask import make_block_mask
from torchtrain.attention.plan import AttentionPlan
from torchtrain.marks import ANCHOR


@bug(documents)
def anchor_for_first_document(document_ids_BT: Tensor) -> Tensor:
    return document_ids_BT.masked_fill(document_ids_BT == 0, 1)


@bug(documents)
def anchor_of_first_row(document_ids_BT: Tensor) -> Tensor:
    return torch.cat([document_ids_BT[:1], document_ids_BT[1:].masked_fill(document_ids_BT[1:] == 0, 1)])


def softmax_is(wrong: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Any:
    """Other probabilities: `wrong(logits, mask, document_ids_BT)`, the first two broadcast to [B, K, G, T, T]."""

    def attend(q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: Any, layer: Any) -> tuple[Tensor, None]:
        ids_BT = plan.document_ids_BT
        return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, layer, lambda logits, mask: wrong(logits, mask, ids_BT))

    return every_engine(attend)


@bug(softmax_is)
def causal_sees_next(logits: Tensor, mask: Tensor, ids_BT: Tensor) -> Tensor:
    same_BTT = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (ids_BT >= 0)[:, None, :]
    return plain.softmax(logits, mask | same_BTT.triu(1).tril(1)[:, None, None])


@bug(softmax_is)
def causal_top_left(logits: Tensor, mask: Tensor, ids_BT: Tensor) -> Tensor:
    index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    anchors_B11 = (ids_BT == ANCHOR).sum(1)[:, None, None]
    # The query's own place among its keys, were it aligned top-left, is A places too early.
    late_BTT = (ids_BT > ANCHOR)[:, :, None] & (index_T[None, None, :] > index_T[None, :, None] - anchors_B11)
    late_BTT &= (ids_BT > ANCHOR)[:, None, :]
    return plain.softmax(logits, mask & ~late_BTT[:, None, None])


@bug(documents)
def cu_seqlens_off_by_one(document_ids_BT: Tensor) -> Tensor:
    before_BT, here_BT = document_ids_BT[:, :-1], document_ids_BT[:, 1:]
    late_BT = torch.where((before_BT > 0) & (here_BT > 0), before_BT, here_BT)
    return torch.cat([document_ids_BT[:, :1], late_BT], dim=1)


@bug(documents)
def documents_leak(document_ids_BT: Tensor) -> Tensor:
    return document_ids_BT.clamp(max=1)


@bug(documents)
def first_token_dropped(document_ids_BT: Tensor) -> Tensor:
    first_BT = torch.zeros_like(document_ids_BT, dtype=torch.bool)
    first_BT[:, 1:] = (document_ids_BT[:, 1:] != document_ids_BT[:, :-1]) & (document_ids_BT[:, 1:] > 0)
    alone = document_ids_BT.amax() + torch.arange(1, document_ids_BT.shape[1] + 1, device=document_ids_BT.device)
    return torch.where(first_BT, alone, document_ids_BT)


@bug(attention)
def gqa_heads_tiled(attend, q: Tensor, k: Tensor, v: Tensor, plan, **options):
    groups = q.shape[2] // k.shape[2]
    k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))
    return attend(q, k, v, plan, **options)


@bug(attention)
def keys_and_values_swapped(attend, q, k, v, plan, **options):
    return attend(q, v, k, plan, **options)


@bug(documents)
def last_document_dropped(document_ids_BT: Tensor) -> Tensor:
    last_B1 = document_ids_BT.amax(dim=1, keepdim=True)
    return torch.where((document_ids_BT == last_B1) & (last_B1 > 1), -1, document_ids_BT)


@bug(softmax_is)
def lse_without_anchor(logits: Tensor, mask: Tensor, ids_BT: Tensor) -> Tensor:
    foreign_BTT = ((ids_BT == ANCHOR)[:, None, :] & (ids_BT > ANCHOR)[:, :, None])[:, None, None]
    right = logits.masked_fill(~mask, -1e30).logsumexp(-1, keepdim=True)
    without_anchor = logits.masked_fill(~mask | foreign_BTT, -1e30).logsumexp(-1, keepdim=True)
    return plain.softmax(logits, mask) * (right - without_anchor).exp()


mask_added = Bug(lambda: softmax_is(lambda logits, mask, _: (logits + mask).softmax(-1)))


@bug(documents)
def padding_visible(document_ids_BT: Tensor) -> Tensor:
    return torch.where(document_ids_BT < 0, document_ids_BT.amax() + 1, document_ids_BT)


@bug(softmax_is)
def probabilities_rounded_before_sum(logits: Tensor, mask: Tensor, _: Tensor) -> Tensor:
    logits = logits.masked_fill(~mask, -1e30)
    exponentials = (logits - logits.amax(-1, keepdim=True)).exp().bfloat16() * mask
    total = exponentials.sum(-1, keepdim=True)  # in bfloat16 too
    return (exponentials / total.clamp(min=1)).to(logits.dtype)


_rotate = modeling_qwen3.apply_rotary_pos_emb


@bug(method, modeling_qwen3.Qwen3Attention, "forward")
def qk_norm_after_rope(attend, self, *args, **kwargs):
    norms = self.q_norm.forward, self.k_norm.forward

    def rotate_then_norm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(norm(x) for norm, x in zip(norms, _rotate(q, k, cos, sin), strict=True))

    with (
        patch.object(self.q_norm, "forward", lambda x: x),
        patch.object(self.k_norm, "forward", lambda x: x),
        patch.object(modeling_qwen3, "apply_rotary_pos_emb", rotate_then_norm),
    ):
        return attend(self, *args, **kwargs)


@bug(attention)
def softmax_scale_missing(attend, *given, **options):
    return attend(*given, **options | {"scale": 1.0})


@bug(attention)
def scale_of_64_beyond(attend, q_BTHD: Tensor, *args, scale: float, **options):
    return attend(q_BTHD, *args, scale=64**-0.5 if q_BTHD.shape[3] > 64 else scale, **options)


documents_in_int8 = Bug(lambda: documents(lambda document_ids_BT: document_ids_BT.clamp(max=127)))


@bug(documents)
def anchor_of_two_at_most(document_ids_BT: Tensor) -> Tensor:
    index_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    return document_ids_BT.masked_fill((document_ids_BT == ANCHOR) & (index_T > 1), 1)


@bug(documents)
def anchor_where_none_is(document_ids_BT: Tensor) -> Tensor:
    document_ids_BT[:, 0] = ANCHOR
    return document_ids_BT


plan_of_earlier_ids = Bug(lambda: patch("torchtrain.attention.remember._is_unchanged", lambda *_: True))


@bug(method, AttentionPlan, "_live_pairs_within")
def pairs_without_windows(count, plan, *_):
    return plan.live_pairs


@bug(method, AttentionPlan, "_live_pairs_within")
def pairs_without_the_kept_anchor(count, plan, window, _):
    return count(plan, window, False)


_full = property(lambda plan: plan.document_ids_BT.numel() * (plan.document_ids_BT.shape[1] + 1) // 2)
pairs_of_full_attention = Bug(lambda: patch.object(AttentionPlan, "live_pairs", _full))
longest_keys_without_anchor = Bug(lambda: patch.object(AttentionPlan, "max_seqlen_k", AttentionPlan.max_seqlen_q))


def blocks_of(change: Callable[[Tensor], Tensor]) -> Any:
    """FlexAttention's blocks of other documents, under the right rule inside of those that are not full."""

    def changed(make: Any, ids_BT: Tensor, *rest: Any) -> Any:
        wrong = make(change(ids_BT), *rest)
        wrong.mask_mod = make(ids_BT, *rest).mask_mod
        return wrong

    return around(make_block_mask, changed)


block_of_the_anchor_is_the_first_documents = Bug(lambda: blocks_of(lambda ids_BT: ids_BT.masked_fill(ids_BT == 0, 1)))
full_block_of_two_documents = Bug(lambda: blocks_of(lambda ids_BT: ids_BT.clamp(max=3)))
