"""Wrong attention functions by the class of what shows them: `parity check` refuses every one, and right ones pass.

docs/zoo.md has the count of those that were refused before the check had cases for these classes.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import attention, check_attention, declare
from parity_tests.tests.attention_by_hand import right, softmax_attention
from torchtrain.attention import visible_BTT


def _by_logits(probabilities):
    """Attention whose probabilities are `probabilities(logits, mask)`, each [B, H, T, T]."""

    def wrong(q: Tensor, k, v, document_ids, scale):
        mask = visible_BTT(document_ids)[:, None]
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2).transpose(1, 2) for x in (k, v))
        logits = q.transpose(1, 2).float() @ k.float().mT * scale
        return (probabilities(logits, mask).to(v.dtype) @ v).transpose(1, 2)

    return wrong


def _normalise(weights, mask):
    weights = weights.masked_fill(~mask, 0.0)
    total = weights.sum(-1, keepdim=True)
    return weights / total.masked_fill(total == 0, 1.0)


def _softmax(logits, mask):
    top = logits.masked_fill(~mask, torch.finfo(logits.dtype).min).amax(-1, keepdim=True)
    return _normalise((logits - top.detach()).exp(), mask)


def _from_zero(logits, mask):
    top = logits.masked_fill(~mask, 0.0).amax(-1, keepdim=True).clamp(min=0)
    return _normalise((logits - top.detach()).exp(), mask)


def _running_from(start):
    def probabilities(logits, mask):
        top = logits.masked_fill(~mask, start).amax(-1, keepdim=True).clamp(min=start)
        return _normalise((logits - top.detach()).exp(), mask)

    return probabilities


def _added_mask(value):
    return lambda logits, mask: (logits + (~mask) * value).softmax(-1) * mask.any(-1, keepdim=True)


def _one_of_equals(logits, mask):
    """Of keys with one logit the first alone counts."""
    hidden = logits.masked_fill(~mask, float("-inf"))
    doubles = (hidden[..., 1:] == hidden[..., :-1]) & mask[..., 1:]
    return _softmax(logits, torch.cat([mask[..., :1].expand(logits[..., :1].shape), mask[..., 1:] & ~doubles], -1))


def _hard(logits, mask):
    p = _softmax(logits, mask)
    top = p.amax(-1, keepdim=True)
    return torch.where((top > 0.99).expand_as(p), (p == top).to(p.dtype), p)


def _with_epsilon(logits, mask):
    top = logits.masked_fill(~mask, -1e30).amax(-1, keepdim=True).clamp(min=-60)
    weights = (logits - top.detach()).exp().masked_fill(~mask, 0.0)
    return weights / (weights.sum(-1, keepdim=True) + 1e-12)


SIZE = {
    "no maximum": _by_logits(lambda logits, mask: _normalise(logits.exp(), mask)),
    "maximum from zero": _by_logits(_from_zero),
    "maximum from -5": _by_logits(_running_from(-5.0)),
    "capped at 50": _by_logits(lambda logits, mask: _softmax(50 * torch.tanh(logits / 50), mask)),
    "clamped at 80": _by_logits(lambda logits, mask: _softmax(logits.clamp(-80, 80), mask)),
    "clamped below": _by_logits(lambda logits, mask: _softmax(logits.clamp(min=-64), mask)),
    "mask of -30": _by_logits(_added_mask(-30.0)),
    "mask of -100": _by_logits(_added_mask(-100.0)),
    "constant for the maximum": _by_logits(lambda logits, mask: _normalise((logits - 20).exp(), mask)),
    "one of equals": _by_logits(_one_of_equals),
    "hard where it is peaked": _by_logits(_hard),
    "epsilon below": _by_logits(_with_epsilon),
}


def _visible_by(change):
    """The rule on changed document ids."""

    def wrong(q: Tensor, k, v, document_ids, scale):
        return right(q, k, v, change(document_ids), scale)

    return wrong


def _first_documents(most):
    return _visible_by(lambda ids: ids.clamp(max=most))


def _window(length):
    """Keys further back than `length` are not seen, but for the anchor."""

    def probabilities(ids):
        T = ids.shape[1]
        back = torch.arange(T)[:, None] - torch.arange(T)[None, :]
        return visible_BTT(ids) & ((back < length) | (ids == 0)[:, None, :])

    def wrong(q: Tensor, k, v, document_ids, scale):
        return softmax_attention(q, k, v, probabilities(document_ids), scale)

    return wrong


def _anchor_to(most):
    """Only the first tokens of the anchor are seen by documents."""

    def wrong(q: Tensor, k, v, document_ids, scale):
        own = document_ids[:, :, None] == document_ids[:, None, :]
        mask = visible_BTT(document_ids) & (own | (torch.arange(document_ids.shape[1]) < most))
        return softmax_attention(q, k, v, mask, scale)

    return wrong


def _no_padding_beyond(length):
    return _visible_by(lambda ids: torch.where((torch.arange(ids.shape[1]) >= length) & (ids < 0), ids.amax() + 1, ids))


LONG = {
    "ids in int8": lambda q, k, v, document_ids, scale: right(q, k, v, document_ids.to(torch.int8).long(), scale),
    "128 documents at most": _first_documents(128),
    "64 documents at most": _first_documents(64),
    "ids modulo 128": _visible_by(lambda ids: torch.where(ids > 127, ids - 127, ids)),
    "window of 256": _window(256),
    "window of 512": _window(512),
    "window of 1,024": _window(1024),
    "anchor of 128 at most": _anchor_to(128),
    "anchor of 64 at most": _anchor_to(64),
    "padding beyond 400": _no_padding_beyond(400),
    "rows beyond 512": _visible_by(lambda ids: torch.where(torch.arange(ids.shape[1]) >= 512, 1, ids)),
    "rows beyond 1,024": _visible_by(lambda ids: torch.where(torch.arange(ids.shape[1]) >= 1024, 1, ids)),
}


def _as_if_contiguous(x: Tensor) -> Tensor:
    strides = torch.empty(x.shape).stride()
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x if x.numel() > room else x.as_strided(x.shape, strides)


def _of(change, which="qkv"):
    def wrong(q: Tensor, k, v, document_ids, scale):
        given = {"q": q, "k": k, "v": v}
        return right(*(change(x) if name in which else x for name, x in given.items()), document_ids, scale)

    return wrong


def _from_the_start(x: Tensor) -> Tensor:
    return x.as_strided(x.shape, x.stride(), 0) if x.numel() else x


def _token_stride_of_heads(x: Tensor) -> Tensor:
    """The stride of a token taken for heads times head_dim."""
    strides = (x.shape[1] * x.shape[2] * x.shape[3], x.shape[2] * x.shape[3], *x.stride()[2:])
    last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided(x.shape, strides) if last < room else x


def _head_stride_of_dim(x: Tensor) -> Tensor:
    strides = (x.stride(0), x.stride(1), x.shape[3], 1)
    last = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True))
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided(x.shape, strides) if last < room else x


STRIDES = {
    "all strides ignored": _of(_as_if_contiguous),
    "strides of k ignored": _of(_as_if_contiguous, "k"),
    "strides of v ignored": _of(_as_if_contiguous, "v"),
    "strides of q ignored": _of(_as_if_contiguous, "q"),
    "offset ignored": _of(_from_the_start),
    "offset of k ignored": _of(_from_the_start, "k"),
    "token's stride assumed": _of(_token_stride_of_heads),
    "head's stride assumed": _of(_head_stride_of_dim),
    "view": _of(lambda x: x.view(x.shape[0], -1).view(x.shape)),
    "a stride of 0 divided by": _of(lambda x: x if min(x.stride()) else x * 0, "kv"),
}


def _dims(most):
    return lambda q, k, v, document_ids, scale: right(
        torch.where(torch.arange(q.shape[3]) < most, q, 0.0), k, v, document_ids, scale
    )


def _scaled(change):
    return lambda q, k, v, document_ids, scale: right(q, k, v, document_ids, change(scale, q.shape[3]))


def _values_to(most):
    return lambda q, k, v, document_ids, scale: right(
        q, k, torch.where(torch.arange(v.shape[3]) < most, v, 0.0), document_ids, scale
    )


HEADS = {
    "64 dimensions at most": _dims(64),
    "96 dimensions at most": _dims(96),
    "32 dimensions at most": _dims(32),
    "values of 64 at most": _values_to(64),
    "values of 96 at most": _values_to(96),
    "scale of the padded head": _scaled(lambda s, D: s * (D / (1 << (D - 1).bit_length())) ** 0.5),
    "scale in bfloat16": _scaled(lambda s, D: float(torch.tensor(s).bfloat16())),
    "scale of a power of two": _scaled(lambda s, D: 2.0 ** round(float(torch.tensor(s).log2()))),
    "scale at least a tenth": _scaled(lambda s, D: max(s, 0.1)),
    "scale at most a quarter": _scaled(lambda s, D: min(s, 0.25)),
    "scale of 64 beyond 64": _scaled(lambda s, D: s if D <= 64 else 0.125 * s * D**0.5),
    "scale in float16": _scaled(lambda s, D: float(torch.tensor(s).half())),
}


def _remember(key):
    """A function that keeps the mask of its first call, under `key` of the ids."""
    kept: dict = {}

    def wrong(q: Tensor, k, v, document_ids, scale):
        mask = kept.setdefault(key(document_ids), visible_BTT(document_ids))
        return softmax_attention(q, k, v, mask, scale)

    return wrong


def _under(is_so):
    return lambda q, k, v, document_ids, scale: right(q, k, v, document_ids, scale * (1.01 if is_so() else 1.0))


# The tests' check of shapes cannot be compiled, so this one asks for a mask.
@attention(layout="BHTD", library="torch")
def _other_under_compile(q, k, v, mask, scale):
    scale = scale * (1.01 if torch.compiler.is_compiling() else 1.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)


CALLS = {
    "mask kept by shape": _remember(lambda ids: ids.shape),
    "mask kept by address": _remember(lambda ids: ids.data_ptr()),
    "mask kept by object": _remember(lambda ids: id(ids)),
    "mask kept by length and documents": _remember(lambda ids: (ids.shape, int(ids.max()), int(ids.min()))),
    "mask kept by the sum": _remember(lambda ids: (ids.shape, int(ids.sum()))),
    "mask kept by the first document": _remember(lambda ids: (ids.shape, int((ids == 1).sum()), int(ids.max()))),
    "mask kept by first and last id": _remember(lambda ids: (ids.shape, int(ids[0, 0]), int(ids[0, -1]))),
    "other under inference mode": _under(torch.is_inference_mode_enabled),
    "other without gradients": _under(lambda: not torch.is_grad_enabled()),
    "other with gradients": _under(torch.is_grad_enabled),
    "other under compile": _other_under_compile,
    "other under autocast": _under(lambda: torch.is_autocast_enabled("cpu")),
}

CLASSES = {"size": SIZE, "long": LONG, "strides": STRIDES, "heads": HEADS, "calls": CALLS}

LAYOUTS_OF = {
    "size": ["large_logits", "large_logits_anchor", "intra"],
    "strides": ["sliced", "transposed", "expanded_heads"],
    "heads": ["another_scale", "larger_scale"],
    "calls": ["intra", "anchor"],
}
HEAD_DIMS_OF = {"heads": [16, 64, 96, 128]}
# Under autocast right functions round otherwise, so it is not tried.
NOT_SEEN = {"other under autocast"}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, functions in CLASSES.items() for name in functions])
def test_a_wrong_function_is_refused(kind, name):
    fn = CLASSES[kind][name]
    layouts = [LONG_LAYOUTS[name]] if kind == "long" else LAYOUTS_OF[kind]
    options = {"adapter": declare(library="torch"), "heads": [(4, 2)], "dtypes": ["float32"], "layouts": layouts}
    sizes = HEAD_DIMS_OF.get(kind, [16])
    results = [check_attention(fn, head_dim=size, backward=kind == "calls", **options) for size in sizes]
    assert any(not result.passed for result in results) == (name not in NOT_SEEN)


# Where each of the class shows.
LONG_LAYOUTS = {
    **dict.fromkeys(
        ("ids in int8", "128 documents at most", "64 documents at most", "ids modulo 128"), "many_documents"
    ),
    **dict.fromkeys(("window of 512", "window of 1,024", "rows beyond 512", "rows beyond 1,024"), "one_long"),
    **dict.fromkeys(("anchor of 128 at most", "anchor of 64 at most", "padding beyond 400"), "long_anchor"),
    "window of 256": "off_blocks_anchor",
}
