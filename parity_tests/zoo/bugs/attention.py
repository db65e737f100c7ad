"""Bugs of the forward pass: masks, heads, softmax and what reaches an attention engine."""

from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.qwen3 import modeling_qwen3

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import attention, documents, every_engine
from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan
from torchtrain.marks import ANCHOR


def _first_only(document_ids_BT: Tensor) -> Tensor:
    return document_ids_BT.masked_fill(document_ids_BT == 0, 1)


anchor_for_first_document = Bug(lambda: documents(_first_only))


def _first_row_only(document_ids_BT: Tensor) -> Tensor:
    return torch.cat([document_ids_BT[:1], document_ids_BT[1:].masked_fill(document_ids_BT[1:] == 0, 1)])


anchor_of_first_row = Bug(lambda: documents(_first_row_only))


def _causal_sees_next_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    ids_BT = plan.document_ids_BT
    same_BTT = (ids_BT[:, :, None] == ids_BT[:, None, :]) & (ids_BT >= 0)[:, None, :]
    next_BTT = same_BTT.triu(1).tril(1)[:, None, None]
    return plain.attend(
        q_BTHD, k_BTKD, v_BTKD, plan, layer, lambda logits, mask: plain.softmax(logits, mask | next_BTT)
    )


causal_sees_next = Bug(lambda: every_engine(_causal_sees_next_attend))


def _causal_top_left_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    ids_BT = plan.document_ids_BT
    index_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    anchors_B11 = (ids_BT == ANCHOR).sum(1)[:, None, None]
    # The query's own place among its keys, were it aligned top-left, is A places too early.
    late_BTT = (ids_BT > ANCHOR)[:, :, None] & (index_T[None, None, :] > index_T[None, :, None] - anchors_B11)
    late_BTT &= (ids_BT > ANCHOR)[:, None, :]

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        return plain.softmax(logits, mask & ~late_BTT[:, None, None])

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, layer, probabilities)


causal_top_left = Bug(lambda: every_engine(_causal_top_left_attend))


def _late(document_ids_BT: Tensor) -> Tensor:
    before_BT, here_BT = document_ids_BT[:, :-1], document_ids_BT[:, 1:]
    late_BT = torch.where((before_BT > 0) & (here_BT > 0), before_BT, here_BT)
    return torch.cat([document_ids_BT[:, :1], late_BT], dim=1)


cu_seqlens_off_by_one = Bug(lambda: documents(_late))


def _one_document(document_ids_BT: Tensor) -> Tensor:
    return document_ids_BT.clamp(max=1)


documents_leak = Bug(lambda: documents(_one_document))


def _alone(document_ids_BT: Tensor) -> Tensor:
    first_BT = torch.zeros_like(document_ids_BT, dtype=torch.bool)
    first_BT[:, 1:] = (document_ids_BT[:, 1:] != document_ids_BT[:, :-1]) & (document_ids_BT[:, 1:] > 0)
    alone = document_ids_BT.amax() + torch.arange(1, document_ids_BT.shape[1] + 1, device=document_ids_BT.device)
    return torch.where(first_BT, alone, document_ids_BT)


first_token_dropped = Bug(lambda: documents(_alone))


def _gqa_heads_tiled(attend):
    def tile(q: Tensor, k: Tensor, v: Tensor, plan, **options):
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))
        return attend(q, k, v, plan, **options)

    return tile


gqa_heads_tiled = Bug(lambda: attention(_gqa_heads_tiled))


def _keys_and_values_swapped(attend):
    return lambda q, k, v, plan, **options: attend(q, v, k, plan, **options)


keys_and_values_swapped = Bug(lambda: attention(_keys_and_values_swapped))


def _without_last(document_ids_BT: Tensor) -> Tensor:
    last_B1 = document_ids_BT.amax(dim=1, keepdim=True)
    return torch.where((document_ids_BT == last_B1) & (last_B1 > 1), -1, document_ids_BT)


last_document_dropped = Bug(lambda: documents(_without_last))


def _lse_without_anchor_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    ids_BT = plan.document_ids_BT
    foreign_BTT = ((ids_BT == ANCHOR)[:, None, :] & (ids_BT > ANCHOR)[:, :, None])[:, None, None]

    def probabilities(logits: Tensor, mask: Tensor) -> Tensor:
        right = logits.masked_fill(~mask, -1e30).logsumexp(-1, keepdim=True)
        without_anchor = logits.masked_fill(~mask | foreign_BTT, -1e30).logsumexp(-1, keepdim=True)
        return plain.softmax(logits, mask) * (right - without_anchor).exp()

    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, layer, probabilities)


lse_without_anchor = Bug(lambda: every_engine(_lse_without_anchor_attend))


def _mask_added_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, layer, lambda logits, mask: (logits + mask).softmax(-1))


mask_added = Bug(lambda: every_engine(_mask_added_attend))


def _one_more(document_ids_BT: Tensor) -> Tensor:
    return torch.where(document_ids_BT < 0, document_ids_BT.amax() + 1, document_ids_BT)


padding_visible = Bug(lambda: documents(_one_more))


def _probabilities(logits: Tensor, mask: Tensor) -> Tensor:
    logits = logits.masked_fill(~mask, -1e30)
    exponentials = (logits - logits.amax(-1, keepdim=True)).exp().bfloat16() * mask
    total = exponentials.sum(-1, keepdim=True)  # in bfloat16 too
    return (exponentials / total.clamp(min=1)).to(logits.dtype)


def _probabilities_rounded_before_sum_attend(
    q_BTHD: Tensor, k_BTKD: Tensor, v_BTKD: Tensor, plan: AttentionPlan, layer: LayerOptions
) -> tuple[Tensor, None]:
    return plain.attend(q_BTHD, k_BTKD, v_BTKD, plan, layer, _probabilities)


probabilities_rounded_before_sum = Bug(lambda: every_engine(_probabilities_rounded_before_sum_attend))


_qk_norm_after_rope_attend = modeling_qwen3.Qwen3Attention.forward
_rotate = modeling_qwen3.apply_rotary_pos_emb


def _qk_norm_after_rope_forward(self, *args, **kwargs):
    norms = self.q_norm.forward, self.k_norm.forward

    def rotate_then_norm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(norm(x) for norm, x in zip(norms, _rotate(q, k, cos, sin), strict=True))

    with (
        patch.object(self.q_norm, "forward", lambda x: x),
        patch.object(self.k_norm, "forward", lambda x: x),
        patch.object(modeling_qwen3, "apply_rotary_pos_emb", rotate_then_norm),
    ):
        return _qk_norm_after_rope_attend(self, *args, **kwargs)


qk_norm_after_rope = Bug(lambda: patch.object(modeling_qwen3.Qwen3Attention, "forward", _qk_norm_after_rope_forward))


def _softmax_scale_missing(attend):
    return lambda q, k, v, plan, **options: attend(q, k, v, plan, **options | {"scale": 1.0})


softmax_scale_missing = Bug(lambda: attention(_softmax_scale_missing))


def _scale_of_64(original):
    def attend(q_BTHD: Tensor, *args, scale: float, **kwargs):
        return original(q_BTHD, *args, scale=64**-0.5 if q_BTHD.shape[3] > 64 else scale, **kwargs)

    return attend


scale_of_64_beyond = Bug(lambda: attention(_scale_of_64))

documents_in_int8 = Bug(lambda: documents(lambda document_ids_BT: document_ids_BT.clamp(max=127)))


def _two_anchor_tokens(document_ids_BT: Tensor) -> Tensor:
    index_T = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device)
    return document_ids_BT.masked_fill((document_ids_BT == ANCHOR) & (index_T > 1), 1)


anchor_of_two_at_most = Bug(lambda: documents(_two_anchor_tokens))


def _first_token_is_anchor(document_ids_BT: Tensor) -> Tensor:
    document_ids_BT[:, 0] = ANCHOR
    return document_ids_BT


anchor_where_none_is = Bug(lambda: documents(_first_token_is_anchor))
