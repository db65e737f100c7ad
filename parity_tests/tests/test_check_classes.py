"""Wrong attention functions, some of each class in docs/zoo.md: `parity check` refuses every one.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import Adapter, attention, check_attention
from parity_tests.tests.attention_by_hand import right, softmax_attention, with_mask
from torchtrain.attention import visible_BTT

pytestmark = pytest.mark.usefixtures("quickly_compiled")


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


def _added_mask(value):
    return lambda logits, mask: (logits + (~mask) * value).softmax(-1) * mask.any(-1, keepdim=True)


def _one_of_equals(logits, mask):
    """Of keys with one logit the first alone counts."""
    hidden = logits.masked_fill(~mask, float("-inf"))
    doubles = (hidden[..., 1:] == hidden[..., :-1]) & mask[..., 1:]
    return _softmax(logits, torch.cat([mask[..., :1].expand(logits[..., :1].shape), mask[..., 1:] & ~doubles], -1))


SIZE = {
    "no maximum": _by_logits(lambda logits, mask: _normalise(logits.exp(), mask)),
    "maximum from zero": _by_logits(_from_zero),
    "mask of -30": _by_logits(_added_mask(-30.0)),
    "one of equals": _by_logits(_one_of_equals),
}


def _window(length):
    """Keys further back than `length` are not seen, but for the anchor."""

    def mask(ids):
        T = ids.shape[1]
        back = torch.arange(T)[:, None] - torch.arange(T)[None, :]
        return visible_BTT(ids) & ((back < length) | (ids == 0)[:, None, :])

    return with_mask(mask)


def _anchor_to(most):
    """Only the first tokens of the anchor are seen by documents."""
    return with_mask(
        lambda ids: visible_BTT(ids) & ((ids[:, :, None] == ids[:, None, :]) | (torch.arange(ids.shape[1]) < most))
    )


LONG = {
    "ids in int8": lambda q, k, v, document_ids, scale: right(q, k, v, document_ids.to(torch.int8).long(), scale),
    "window of 1,024": _window(1024),
    "anchor of 128 at most": _anchor_to(128),
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


STRIDES = {
    "all strides ignored": _of(_as_if_contiguous),
    "offset ignored": _of(_from_the_start),
    "a stride of 0 divided by": _of(lambda x: x if min(x.stride()) else x * 0, "kv"),
}


def _dims(most):
    return lambda q, k, v, document_ids, scale: right(
        torch.where(torch.arange(q.shape[3]) < most, q, 0.0), k, v, document_ids, scale
    )


def _scaled(change):
    return lambda q, k, v, document_ids, scale: right(q, k, v, document_ids, change(scale, q.shape[3]))


HEADS = {
    "64 dimensions at most": _dims(64),
    "scale of the padded head": _scaled(lambda s, D: s * (D / (1 << (D - 1).bit_length())) ** 0.5),
    "scale in bfloat16": _scaled(lambda s, D: float(torch.tensor(s).bfloat16())),
}


def _remember(key):
    """A function that keeps the mask of its first call under `key` of the ids."""
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
    "other under inference mode": _under(torch.is_inference_mode_enabled),
    "other without gradients": _under(lambda: not torch.is_grad_enabled()),
    "other under compile": _other_under_compile,
    "other scale by default": lambda q, k, v, document_ids, scale=None: right(q, k, v, document_ids, scale or 0.24),
}


def _padded(q: Tensor, k, v, document_ids, scale):
    """Rows are filled up to a multiple of 64; `[:, :-0]` is empty."""
    more = -q.shape[1] % 64
    q, k, v = (F.pad(x, (0, 0, 0, 0, 0, more)) for x in (q, k, v))
    return right(q, k, v, F.pad(document_ids, (0, more), value=-1), scale)[0][:, :-more]


BLOCKS = {"cut by nothing": _padded}
SIZES = {"values in float16": _of(lambda x: x.half().to(x.dtype), "v")}


class _Overwritten(torch.autograd.Function):
    """Keeps its graph on the class, and scales the output's gradient where it lies."""

    @staticmethod
    def forward(ctx, q, k, v, ids, scale, own):
        ctx.own, leaves = own, [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            _Overwritten.kept = leaves, right(*leaves, ids, scale)[0]
        return _Overwritten.kept[1].detach()

    @staticmethod
    def backward(ctx, grad):
        leaves, out = _Overwritten.kept
        grads = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        return *grads, None, None, grad.contiguous().mul_(0.5) if ctx.own else None


BACKWARD = {
    "saved on the class": lambda q, k, v, document_ids, scale: _Overwritten.apply(q, k, v, document_ids, scale, None),
    "output's gradient in place": lambda q, k, v, document_ids, scale: _Overwritten.apply(
        q, k, v, document_ids, scale, torch.ones_like(q, requires_grad=True)
    ),
}

CLASSES = {
    "blocks": BLOCKS,
    "sizes": SIZES,
    "backward": BACKWARD,
    "size": SIZE,
    "long": LONG,
    "strides": STRIDES,
    "heads": HEADS,
    "calls": CALLS,
}

LAYOUTS_OF = {
    "blocks": ["whole_blocks"],
    "sizes": ["another_scale"],
    "backward": ["intra"],
    "size": ["large_logits", "large_logits_anchor", "intra"],
    "strides": ["sliced", "transposed", "expanded_heads"],
    "heads": ["another_scale", "larger_scale"],
    "calls": ["intra", "anchor"],
}
CASES = [
    pytest.param(kind, name, marks=[pytest.mark.sweep] if kind == "long" else [])  # a minute of compiling
    for kind, functions in CLASSES.items()
    for name in functions
]


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_wrong_function_is_refused(kind, name):
    fn = CLASSES[kind][name]
    layouts = [LONG_LAYOUTS[name]] if kind == "long" else LAYOUTS_OF[kind]
    options = {
        "adapter": Adapter(library="torch"),
        "heads": [(4, 2)],
        "dtypes": ["bfloat16" if kind == "sizes" else "float32"],
        "layouts": layouts,
    }
    size = 96 if kind == "heads" else 16  # no power of two, whose root bfloat16 lacks
    assert not check_attention(fn, head_dim=size, backward=kind in ("calls", "backward"), **options).passed


# Where each of the class shows.
LONG_LAYOUTS = {"ids in int8": "many_documents", "anchor of 128 at most": "long_anchor", "window of 1,024": "one_long"}
