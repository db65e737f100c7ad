"""The judge of other people's attention names in words how a function breaks down.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import itertools
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import Adapter, NotTheSame, check_attention
from parity_tests.tests.attention_by_hand import ONE, right, softmax_attention
from torchtrain.attention import visible_BTT


def leaves(q, k, v, document_ids, scale):
    sys.exit(0)


def raises_on_padding(q, k, v, document_ids, scale):
    if (document_ids < 0).any():
        raise IndexError("index -1 is\nout of range")
    return right(q, k, v, document_ids, scale)


def scales_in_place(q, k, v, document_ids, scale):
    q *= scale
    return right(q, k, v, document_ids, 1.0)


def writes_its_ids(q, k, v, document_ids, scale):
    document_ids += 1
    return right(q, k, v, document_ids - 1, scale)


def nan_at_padding(q, k, v, document_ids, scale):
    mask = visible_BTT(document_ids)[:, None]
    k, v = (x.transpose(1, 2).repeat_interleave(2, 1) for x in (k, v))
    logits = (q.transpose(1, 2) @ k.mT * scale).masked_fill(~mask, float("-inf"))
    return (logits.softmax(-1) @ v).transpose(1, 2)


def no_graph(q, k, v, document_ids, scale):
    return right(q.detach(), k.detach(), v.detach(), document_ids, scale)


def detached(q, k, v, document_ids, scale):
    return right(q, k.detach(), v, document_ids, scale)


BROKEN = {
    "leaves": (leaves, "raises SystemExit: 0"),
    "raises": (raises_on_padding, "First, padded_end-h4k2d16-float32: raises IndexError: index -1 is out of range"),
    "q in place": (scales_in_place, "changes its input q in place"),
    "ids in place": (writes_its_ids, "changes its input document_ids in place"),
    "NaN": (
        nan_at_padding,
        "out is NaN at row 0, token 36 (padding) and only at padding: put rows that see nothing to 0",
    ),
    "None": (lambda q, k, v, document_ids: None, "returns None; expected a torch array"),
    "numpy": (lambda q, k, v, document_ids: q.numpy(), "returns a numpy.ndarray"),
    "empty": (lambda q, k, v, document_ids: (), "returns an empty tuple"),
    "shape": (
        lambda q, k, v, document_ids: q[:, 1:],
        "returns out of shape [1, 46, 4, 16]; expected [1, 47, 4, 16] (BTHD)",
    ),
    "dtype": (lambda q, k, v, document_ids: q.double(), "returns out in float64; its inputs are float32"),
    "second": (lambda q, k, v, document_ids: (q, q), "expected the log-sum-exp [1, 4, 47], or declare returns='out'"),
    "no graph": (no_graph, "its output carries no gradient"),
    "detached": (detached, "no gradient reaches k"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_function_that_breaks_down_is_judged_in_words(kind):
    fn, says = BROKEN[kind]
    result = check_attention(fn, layouts=["intra", "padded_end"], adapter=Adapter(library="torch"), **ONE)
    assert result.verdict == "different"
    assert says in result.explain()
    with pytest.raises(NotTheSame, match="DIFFERENT"):
        result.raise_if_different()


def test_not_deterministic_is_reported_and_is_no_failure():
    turn = itertools.count()

    def restless(q: Tensor, k, v, document_ids, scale):
        """The same sums in another order at every call."""
        order = torch.arange(k.shape[1]).roll(next(turn))
        return softmax_attention(q, k[:, order], v[:, order], visible_BTT(document_ids)[:, :, order], scale)

    result = check_attention(restless, layouts=["full", "anchor"], **ONE)
    assert result.passed
    assert "not deterministic: two calls on the same inputs differ" in result.explain()
    forward_only = check_attention(restless, layouts=["full"], backward=False, **ONE)
    assert "isolation is NOT proved everywhere" in forward_only.explain()


def test_another_layout_that_is_right_is_named():
    def heads_first(q, k, v, mask, scale):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)

    result = check_attention(heads_first, layouts=["intra"], **ONE)
    assert "it is right: declare layout='BHTD'" in str(result.hint)
    assert check_attention(heads_first, layouts=["intra"], adapter=Adapter(layout="BHTD"), **ONE).passed
