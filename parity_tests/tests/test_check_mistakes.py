"""The judge of other people's attention names in words what a wrong function does.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import math
import re

import pytest
import torch
from torch import Tensor

from parity_tests.check import Adapter, check_attention
from parity_tests.tests.attention_by_hand import (
    ONE,
    causal,
    interleaved_heads,
    right,
    same,
    softmax_attention,
    with_gradient,
    with_mask,
)
from torchtrain.attention import visible_BTT

FEW = ["intra", "anchor_of_five", "padded_end_anchor", "rows"]


def to_anchor(ids):
    return (ids == 0)[:, None, :] & (ids >= 0)[:, :, None]


def top_left(ids):
    """What a varlen kernel does with other lengths of queries and keys if it counts both from the first."""
    mask = torch.zeros(*ids.shape, ids.shape[1], dtype=torch.bool)
    for b, row in enumerate(ids.tolist()):
        anchor = [t for t, d in enumerate(row) if d == 0]
        for document in {d for d in row if d >= 0}:
            own = [t for t, d in enumerate(row) if d == document]
            keys = own if document == 0 else anchor + own
            for i, t in enumerate(own):
                mask[b, t, keys[: i + 1]] = True
    return mask


def half_inside(q, k, v, document_ids, scale):
    out, _ = softmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), visible_BTT(document_ids), scale)
    return out.to(q.dtype)


def lse_base_2(q, k, v, document_ids, scale):
    out, lse = right(q, k, v, document_ids, scale)
    return out, lse / math.log(2)


def lse_without_anchor(q, k, v, document_ids, scale):
    lse = softmax_attention(q, k, v, causal(document_ids) & same(document_ids), scale)[1]
    return right(q, k, v, document_ids, scale)[0], lse


def anchor_gradient_dropped(name, grad, ids, scale):
    return grad if name == "q" else grad * (ids != 0)[:, :, None, None]


def leak(ids):
    return causal(ids) & (ids >= 0)[:, :, None] & (ids >= 0)[:, None]


def one_sees_the_anchor(ids):
    return visible_BTT(ids) & (same(ids) | (ids == 1)[:, :, None])


# What it does, the function, layouts to show it on, and what the words must say.
WRONG = {
    "leak": (with_mask(leak), FEW, "a leak: documents see one another"),
    "sees the future": (with_mask(lambda ids: same(ids) | to_anchor(ids)), FEW, "the future is visible"),
    "missing anchor": (
        with_mask(lambda ids: same(ids) & causal(ids)),
        FEW,
        "a missing anchor: documents see only themselves",
    ),
    "anchor for one": (with_mask(one_sees_the_anchor), FEW, "only the first document sees the anchor"),
    "top-left": (with_mask(top_left), FEW, "top-left alignment"),
    "no scale": (
        lambda q, k, v, document_ids: right(q, k, v, document_ids, 1.0),
        ["intra", "anchor"],
        "scale is missing",
    ),
    "GQA order": (interleaved_heads, FEW, "GQA heads in the wrong order"),
    "half inside": (half_inside, ["intra"], "some step runs in less than float32 (bfloat16"),
    "zeros": (lambda q, k, v, document_ids: 0 * q, ["intra"], "the output is all zeros"),
    "lse base 2": (lse_base_2, ["anchor"], "the log-sum-exp is in base 2"),
    "lse without anchor": (lse_without_anchor, ["anchor"], "in the log-sum-exp, a missing anchor"),
    **{
        name: (with_gradient(change), ["anchor"], says)
        for name, change, says in [
            ("dk unscaled", lambda name, grad, ids, scale: grad / scale if name == "k" else grad, "dk lacks the scale"),
            ("GQA average", lambda name, grad, ids, scale: grad / 2 if name != "q" else grad, "averaged, not added"),
            ("anchor gradient", anchor_gradient_dropped, "the anchor's"),
        ]
    },
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_function_is_named(kind):
    fn, layouts, says = WRONG[kind]
    result = check_attention(fn, layouts=layouts, adapter=Adapter(library="torch"), **ONE)
    assert result.verdict == "different"
    assert result.hint is not None, result.explain()
    assert says in result.hint, result.explain()


def test_the_words_say_layout_array_ratio_and_place():
    text = check_attention(with_mask(one_sees_the_anchor), layouts=["full", "anchor"], **ONE).explain()
    assert "1 of 2 cases failed" in text
    assert "First, anchor-h4k2d16-float32: out errs" in text
    assert re.search(
        r"times its allowance, most at row 0, token \d+ \(document [23], its token \d+\), head [0-3];", text
    )
    assert "wrong in document 2, document 3 only" in text


def soft_capped(q, k, v, document_ids, scale):
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, dim=2)) * scale
    logits = (50 * torch.tanh(logits / 50)).masked_fill(~visible_BTT(document_ids)[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", logits.softmax(-1), v.repeat_interleave(2, dim=2))


def gross_lse(q, k, v, document_ids, scale):
    out, lse = right(q, k, v, document_ids, scale)
    return out, 1.5 * lse + 0.3


def epsilon_in_denominator(q, k, v, document_ids, scale):
    out, lse = right(q, k, v, document_ids, scale)
    return out / (1 + 1e-2 * torch.exp(-lse)).swapaxes(1, 2)[..., None], lse


def right_but_for_dq(q, k, v, document_ids, scale):
    """A leak in the forward pass, and something else in the gradient."""
    out, lse = with_mask(leak)(q, k, v, document_ids, scale)
    return out + (out - out.detach()) * torch.linspace(0.1, 1.0, out.shape[-1]), lse


@pytest.mark.parametrize("wrong", [soft_capped, gross_lse, epsilon_in_denominator, right_but_for_dq])
def test_what_nothing_explains_gets_no_hint(wrong):
    result = check_attention(wrong, layouts=["intra"], adapter=Adapter(library="torch"), **ONE)
    assert result.verdict == "different"
    assert result.hint is None, result.explain()


# -- what no number shows ----------------------------------------------------------------------------------------------


def faint_leak(q: Tensor, k, v, document_ids, scale):
    """Far below one rounding of the output in the mean, and a leak all the same."""
    out, lse = right(q, k, v, document_ids, scale)
    return out + 2**-13 * v.mean(1, keepdim=True).repeat_interleave(2, dim=2) * (document_ids > 0)[
        :, :, None, None
    ], lse


@pytest.mark.parametrize("backward", [True, False])
def test_a_leak_below_every_allowance_is_still_a_leak(backward):
    result = check_attention(faint_leak, layouts=["intra"], dtypes=["bfloat16"], heads=[(4, 2)], backward=backward)
    (case,) = result.cases
    assert not case.broken
    assert case.isolated is False
    assert result.verdict == "different"
    assert "not isolated" in result.explain()
    assert "document" in result.explain()


def test_a_gradient_that_leaks_is_found_without_a_leak_in_the_output():
    def spill(name, grad, ids, scale):
        return grad + 1e-12 * grad.abs().sum() if name == "v" else grad

    result = check_attention(with_gradient(spill), layouts=["intra"], **ONE)
    assert not result.cases[0].broken
    assert "gives v at row 0, token" in result.explain()
    assert "exactly 0 is right" in result.explain()
