"""Attention written out in a few lines, right and wrong, for tests of the judge.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import attention
from torchtrain.attention import visible_BTT

ONE = {"heads": [(4, 2)], "dtypes": ["float32"]}


def softmax_attention(q, k, v, mask_BTT, scale, kv_head_H=None):
    """Attention under any mask; rows that see nothing give 0. Returns out and the log-sum-exp."""
    H, K = q.shape[2], k.shape[2]
    kv_head_H = torch.arange(H) // (H // K) if kv_head_H is None else kv_head_H
    q, k, v = q.transpose(1, 2), k[:, :, kv_head_H].transpose(1, 2), v[:, :, kv_head_H].transpose(1, 2)
    logits = (q.float() @ k.float().mT * scale).masked_fill(~mask_BTT[:, None], float("-inf"))
    blind = ~mask_BTT.any(-1)[:, None, :, None]
    probs = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    out = (probs.to(v.dtype) @ v).transpose(1, 2)
    return out, logits.logsumexp(-1)


def right(q: Tensor, k: Tensor, v: Tensor, document_ids, scale):
    """The rule, with the log-sum-exp."""
    return softmax_attention(q, k, v, visible_BTT(document_ids), scale)


def with_mask(make_mask):
    """Attention under a mask made of the document ids."""

    def wrong(q: Tensor, k, v, document_ids, scale):
        return softmax_attention(q, k, v, make_mask(document_ids), scale)

    return wrong


def causal(ids):
    """The mask [T, T] of what is not in the future."""
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def same(ids):
    """The mask [B, T, T] of a document's own tokens."""
    return (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :] & (ids >= 0)[:, :, None]


def interleaved_heads(q, k, v, document_ids, scale):
    """Query heads that take the key heads in turn, which is wrong."""
    heads = torch.arange(q.shape[2]) % k.shape[2]
    return softmax_attention(q, k, v, visible_BTT(document_ids), scale, heads)


def with_gradient(change):
    """The right output with other gradients: `change(name, gradient, document_ids, scale)`."""

    def wrong(q: Tensor, k, v, document_ids, scale):
        q, k, v = (_hooked(name, x, document_ids, scale) for name, x in zip("qkv", (q, k, v), strict=True))
        out, lse = right(q, k, v, document_ids, scale)
        return out, lse.detach()

    def _hooked(name, x, ids, scale):
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda grad: change(name, grad, ids, scale))
        return x

    return wrong


@attention(layout="BHTD", library="torch")
def by_mask(q, k, v, attn_mask, scale):
    """The rule from a mask, without a log-sum-exp."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=True)


class Module(torch.nn.Module):
    """The rule as a module, its scale by another name."""

    def forward(self, q, k, v, document_ids, softmax_scale):
        """Attend by the rule."""
        return right(q, k, v, document_ids, softmax_scale)
