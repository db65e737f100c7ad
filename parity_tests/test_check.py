"""The judge of other people's attention: right functions pass however they are called, wrong ones are named in words.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import functools
import itertools
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import NotTheSame, attention, check_attention, check_command, declare
from parity_tests.checking.cases import FEATURES, LAYOUTS
from parity_tests.pytest_helper import attention_cases
from torchtrain.attention import attend, visible_BTT
from torchtrain.tests.flash_on_cpu import FlashOnCPU

ROOT = Path(__file__).parents[1]
ONE = {"heads": [(4, 2)], "dtypes": ["float32"]}
# Short layouts of every kind, and heads in groups of two.
SHORT = [name for name in LAYOUTS if not name.startswith("off_blocks")]
FEW = ["intra", "anchor_of_five", "padded_end_anchor", "rows"]


# -- functions: one right, and its mistakes ----------------------------------------------------------------------------


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
    return softmax_attention(q, k, v, visible_BTT(document_ids), scale)


def with_mask(make_mask):
    def wrong(q: Tensor, k, v, document_ids, scale):
        return softmax_attention(q, k, v, make_mask(document_ids), scale)

    return wrong


def causal(ids):
    return torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()


def same(ids):
    return (ids[:, :, None] == ids[:, None, :]) & (ids >= 0)[:, None, :] & (ids >= 0)[:, :, None]


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


def padding_as_a_document(ids):
    return ((ids[:, :, None] == ids[:, None, :]) | (ids == 0)[:, None, :]) & causal(ids)


def interleaved_heads(q, k, v, document_ids, scale):
    heads = torch.arange(q.shape[2]) % k.shape[2]
    return softmax_attention(q, k, v, visible_BTT(document_ids), scale, heads)


def half_inside(q, k, v, document_ids, scale):
    out, _ = softmax_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), visible_BTT(document_ids), scale)
    return out.to(q.dtype)


def lse_base_2(q, k, v, document_ids, scale):
    out, lse = right(q, k, v, document_ids, scale)
    return out, lse / math.log(2)


def lse_without_anchor(q, k, v, document_ids, scale):
    lse = softmax_attention(q, k, v, causal(document_ids) & same(document_ids), scale)[1]
    return right(q, k, v, document_ids, scale)[0], lse


def with_gradient(change):
    """The right output with other gradients: `change(name, gradient, document_ids, scale)`."""

    def wrong(q: Tensor, k, v, document_ids, scale):
        out, lse = right(
            *(_hooked(name, x, document_ids, scale) for name, x in zip("qkv", (q, k, v), strict=True)),
            document_ids,
            scale,
        )
        return out, lse.detach()

    def _hooked(name, x, ids, scale):
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda grad: change(name, grad, ids, scale))
        return x

    return wrong


def anchor_gradient_dropped(name, grad, ids, scale):
    return grad if name == "q" else grad * (ids != 0)[:, :, None, None]


def leak(ids):
    return causal(ids) & (ids >= 0)[:, :, None] & (ids >= 0)[:, None]


def blind_to_itself(ids):
    return visible_BTT(ids) & ~torch.eye(ids.shape[1], dtype=torch.bool)


def one_sees_the_anchor(ids):
    return visible_BTT(ids) & (same(ids) | (ids == 1)[:, :, None])


def as_in_the_first_row(ids):
    return visible_BTT(ids[:1].expand_as(ids))


def one_token_late(ids):
    return visible_BTT(torch.cat([ids[:, :1], ids[:, :-1]], dim=1))


def own_scale(q, k, v, document_ids, scale):
    return right(q, k, v, document_ids, q.shape[-1] ** -0.5)


def k_as_v(q, k, v, document_ids, scale):
    return right(q, k, k + 0 * v, document_ids, scale)


# What it does, the function, layouts to show it on, and what the words must say.
WRONG = {
    "leak": (with_mask(leak), FEW, "a leak: documents see one another"),
    "sees the future": (with_mask(lambda ids: same(ids) | to_anchor(ids)), FEW, "the future is visible"),
    "no mask": (with_mask(lambda ids: torch.ones_like(same(ids))), FEW, "no mask at all"),
    "blind to itself": (with_mask(blind_to_itself), FEW, "a token does not see itself"),
    "missing anchor": (
        with_mask(lambda ids: same(ids) & causal(ids)),
        FEW,
        "a missing anchor: documents see only themselves",
    ),
    "anchor for one": (with_mask(one_sees_the_anchor), FEW, "only the first document sees the anchor"),
    "top-left": (with_mask(top_left), FEW, "top-left alignment"),
    "padding is a document": (with_mask(padding_as_a_document), FEW, "padding is treated as one more document"),
    "first row's documents": (with_mask(as_in_the_first_row), FEW, "the batch shares the documents of its first row"),
    "boundary late": (with_mask(one_token_late), ["intra"], "documents begin one token late"),
    "no scale": (
        lambda q, k, v, document_ids: right(q, k, v, document_ids, 1.0),
        ["intra", "anchor"],
        "scale is missing",
    ),
    "scale ignored": (own_scale, ["intra", "another_scale"], "the scale that is passed is ignored"),
    "GQA order": (interleaved_heads, FEW, "GQA heads in the wrong order"),
    "half inside": (half_inside, ["intra"], "some step runs in less than float32 (bfloat16"),
    "zeros": (lambda q, k, v, document_ids: 0 * q, ["intra"], "the output is all zeros"),
    "k as v": (k_as_v, ["intra"], "k is used in place of v"),
    "lse base 2": (lse_base_2, ["anchor"], "the log-sum-exp is in base 2"),
    "lse without anchor": (lse_without_anchor, ["anchor"], "in the log-sum-exp, a missing anchor"),
    **{
        name: (with_gradient(change), ["anchor"], says)
        for name, change, says in [
            ("dk unscaled", lambda name, grad, ids, scale: grad / scale if name == "k" else grad, "dk lacks the scale"),
            ("sign of dq", lambda name, grad, ids, scale: -grad if name == "q" else grad, "dq has the wrong sign"),
            ("GQA average", lambda name, grad, ids, scale: grad / 2 if name != "q" else grad, "averaged, not added"),
            ("anchor gradient", anchor_gradient_dropped, "the anchor's"),
        ]
    },
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_function_is_named(kind):
    fn, layouts, says = WRONG[kind]
    result = check_attention(fn, layouts=layouts, adapter=declare(library="torch"), **ONE)
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
    assert "only document 2, document 3 are wrong" in text


def test_in_bfloat16_too():
    result = check_attention(with_mask(top_left), layouts=FEW, dtypes=["bfloat16"], heads=[(4, 2)])
    assert "top-left alignment" in str(result.hint)


def test_an_eager_function_is_told_that_it_rounds_like_eager():
    """Its logits are rounded to half before the softmax: the log-sum-exp shows it."""

    def eager(q: Tensor, k, v, document_ids, scale):
        return attend(q, k, v, document_ids, engine="dense", scale=scale)

    options = {"layouts": ["intra"], "dtypes": ["bfloat16"], "heads": [(4, 2)]}
    assert check_attention(eager, like="eager", **options).passed
    assert "declare like='eager'" in str(check_attention(eager, like="flash", **options).hint)


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


# -- functions that break down -----------------------------------------------------------------------------------------


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
    "raises": (
        raises_on_padding,
        "On layout 'padded_end' (padded_end-h4k2d16-float32) it raises IndexError: index -1 is out of range",
    ),
    "q in place": (scales_in_place, "it changes its input q in place"),
    "ids in place": (writes_its_ids, "it changes its input document_ids in place"),
    "NaN": (
        nan_at_padding,
        "out is NaN at row 0, token 36 (padding) and only at padding: put rows that see nothing to 0",
    ),
    "None": (lambda q, k, v, document_ids: None, "it returns None; expected a torch array"),
    "numpy": (lambda q, k, v, document_ids: q.numpy(), "it returns a numpy.ndarray"),
    "empty": (lambda q, k, v, document_ids: (), "it returns an empty tuple"),
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
    result = check_attention(fn, layouts=["intra", "padded_end"], adapter=declare(library="torch"), **ONE)
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
    assert check_attention(heads_first, layouts=["intra"], adapter=declare(layout="BHTD"), **ONE).passed


# -- right functions, however they are called --------------------------------------------------------------------------


def by_plan(q, k, v, plan, scale):
    return attend(q, k, v, plan, engine="sdpa", scale=scale)[0]


@attention(layout="BHTD", library="torch")
def by_mask(q, k, v, attn_mask, scale):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale, enable_gqa=True)


def by_position(value_BTKD: Tensor, key_BTKD: Tensor, query_BTHD: Tensor, allowed):
    return by_mask(
        query_BTHD.mT.mT.transpose(1, 2), key_BTKD.transpose(1, 2), value_BTKD.transpose(1, 2), allowed, None
    ).transpose(1, 2)


@jax.jit
def in_jax(q, k, v, document_ids, scale):
    kv_heads, heads = k.shape[2], q.shape[2]
    index = jnp.arange(q.shape[1])
    d_q, d_k = document_ids[:, :, None], document_ids[:, None, :]
    mask = (index[None, :] <= index[:, None]) & (d_q >= 0) & ((d_q == d_k) | (d_k == 0))
    k, v = (jnp.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * scale
    logits = jnp.where(mask[:, None], logits, -1e30)
    probs = jnp.where(mask[:, None], jax.nn.softmax(logits), 0.0).astype(v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", probs, v)


class Module(torch.nn.Module):
    def forward(self, q, k, v, document_ids, softmax_scale=None):
        return right(q, k, v, document_ids, softmax_scale)


RIGHT = {
    "document_ids, with lse": (right, None),
    "plan": (by_plan, None),
    "mask": (by_mask, None),
    "v, k, q and a mask of another name": (by_position, declare(documents="mask")),
    "jax": (in_jax, declare(library="jax")),
    "module": (Module(), declare(library="torch")),
    "partial": (functools.partial(right, scale=0.25), declare(library="torch")),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_function_passes(kind):
    fn, adapter = RIGHT[kind]
    result = check_attention(fn, layouts=SHORT, adapter=adapter, heads=[(4, 2)], dtypes=["float32"])
    assert result.passed, result.explain()
    assert "what is invisible has exactly no effect" in result.explain()
    assert len(result.judged) >= len(SHORT) - 1


@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_heads_and_dtypes(dtype, heads):
    result = check_attention(by_plan, layouts=["anchor", "rows_of_every_kind"], dtypes=[dtype], heads=[heads])
    assert result.passed, result.explain()


def test_lengths_off_blocks_and_a_larger_head():
    result = check_attention(
        by_plan, layouts=["off_blocks", "off_blocks_anchor"], dtypes=["bfloat16"], heads=[(4, 2)], head_dim=64
    )
    assert result.passed, result.explain()


def test_torch_varlen_needs_no_adapter():
    """Packed tensors, lengths and the anchor's rows from the plan; the log-sum-exp [H, N] is asked for by a wrapper."""
    from torch.nn.attention.varlen import varlen_attn

    with FlashOnCPU():
        result = check_attention(varlen_attn, layouts=SHORT, dtypes=["bfloat16"], heads=[(4, 2)])
        no_anchor = check_attention(
            _with_one_set_of_lengths, layouts=["intra", "anchor"], dtypes=["bfloat16"], heads=[(4, 2)]
        )
    assert result.passed, result.explain()
    assert result.adapter.documents == "cu_seqlens"
    assert [r.not_run for r in no_anchor.cases] == [None, "lacks anchor"]
    assert no_anchor.passed, no_anchor.explain()


def _with_one_set_of_lengths(q: Tensor, k, v, cu_seqlens, max_seqlen):
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, window_size=(-1, 0), enable_gqa=True)


def test_what_it_lacks_is_listed_and_never_passed():
    @attention(lacks=["anchor", "backward"], dtypes="bfloat16")
    def plain(q: Tensor, k: Tensor, v: Tensor, document_ids, scale):
        return with_mask(lambda ids: same(ids) & causal(ids))(q, k, v, document_ids, scale)[0]

    result = check_attention(plain, layouts=["intra", "anchor"], heads=[(4, 2)])
    assert result.passed
    assert [r.not_run for r in result.cases] == [None, "lacks anchor"]
    assert [r.passed for r in result.cases] == [True, False]
    assert set(result.cases[0].verdicts) == {"out"}
    assert "Not run (lacks anchor): 1 case: anchor." in result.explain()

    nothing = check_attention(plain, layouts=["anchor"], heads=[(4, 2)])
    assert nothing.verdict == "not judged"
    with pytest.raises(NotTheSame, match="NOT JUDGED"):
        nothing.raise_if_different()


def test_every_feature_but_gradients_and_heads_has_a_layout_that_needs_it():
    needed = frozenset().union(*(layout.needs for layout in LAYOUTS.values()))
    assert needed == set(FEATURES) - {"gqa", "backward"} | {"scale"}


# -- declarations ------------------------------------------------------------------------------------------------------


OPEN = {
    "no documents": (lambda q, k, v, lengths: None, None, "declare documents= one of document_ids, plan, mask"),
    "two kinds": (lambda q, k, v, plan, mask: None, None, "takes plan and mask; declare documents="),
    "too few": (lambda q, k: None, None, "takes 2 positional arguments"),
    "no library": (lambda q, k, v, mask: q, None, "declare library='torch' or library='jax'"),
    "more than it knows": (
        lambda q, k, v, mask, alibi: torch.add(q, 0),
        None,
        "parameter 'alibi' has no default and is not known",
    ),
    "no signature": (F.scaled_dot_product_attention, None, "its signature cannot be read"),
    "packed mask": (right, {"layout": "varlen"}, "varlen goes with cu_seqlens"),
    "torch object in jax": (lambda q, k, v, plan: None, {"library": "jax", "documents": "plan"}, "is a torch object"),
    "not taken": (lambda q, k, v: q, {"documents": "mask"}, "none of its parameters can take it"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_what_a_signature_leaves_open_is_asked_for_in_one_line(kind):
    fn, declared, says = OPEN[kind]
    with pytest.raises(ValueError, match=says) as error:
        check_attention(fn, adapter=declare(**declared or {}), **ONE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layouts": ["intro"]}, "layouts: 'intro' is unknown"),
        ({"layouts": []}, "layouts: none given"),
        ({"dtypes": ["fp8"]}, "dtypes: 'fp8' is unknown"),
        ({"heads": [(4, 3)]}, "the first a multiple of the second"),
        ({"head_dim": 0}, "head_dim: 0"),
        ({"like": "eagre"}, "like: 'eagre' is unknown"),
        ({"device": "abacus"}, "device: 'abacus'"),
    ],
)
def test_bad_options_are_named(options, says):
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        check_attention(right, **options)


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"lacks": "anchors"}, "did you mean 'anchor'"),
        ({"layout": "TBHD"}, "choose from BTHD, BHTD, varlen"),
        ({"dtypes": "int8"}, "dtypes: 'int8'"),
    ],
)
def test_bad_declarations_are_named(declared, says):
    with pytest.raises(ValueError, match=says):
        attention(**declared)


# -- the command and the helper ----------------------------------------------------------------------------------------


QUICK = {"layouts": ["intra"], "dtypes": ["float32"], "heads": ["4/2"]}


def test_the_command_says_same(capsys):
    assert check_command("parity_tests.test_check:by_mask", **QUICK) == 0
    out = capsys.readouterr().out
    assert "SAME: by_mask: 1 case on 1 layout; out, dq, dk, dv within their allowance" in out
    assert "intra" in out


def test_the_command_says_different(capsys):
    assert check_command("parity_tests.test_check:interleaved_heads", library="torch", **QUICK) == 1
    assert "It looks like this: GQA heads in the wrong order" in capsys.readouterr().out


def test_the_command_takes_a_file(capsys):
    assert check_command(str(ROOT / "examples" / "check_sdpa.py") + ":attend", **QUICK) == 0
    assert "SAME" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("nowhere.at_all:f", "no module named 'nowhere' here"),
        ("parity_tests.nothing:f", "no module named 'parity_tests.nothing' here"),
        ("parity_tests.test_check:rigth", "has no 'rigth'; did you mean 'right'?"),
        ("parity_tests.test_check:ONE", "is not callable, but a dict"),
        ("parity_tests.test_check:Module", "is a class"),
        ("parity_tests.test_check", "expected module:function"),
        ("nothing.py:f", "no such file"),
        ("FOLDER/broken.py:f", "importing it raises ZeroDivisionError: division by zero"),
        ("FOLDER/leaves.py:f", "importing it raises SystemExit: 3"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_one_line(target, says, tmp_path, capsys):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(3)\n")
    assert check_command(target.replace("FOLDER", str(tmp_path)), **QUICK) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("parity: target ")
    assert says in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_bad_heads_on_the_command_line_are_one_line(capsys):
    assert check_command("parity_tests.test_check:by_mask", heads=["4x2"]) == 2
    assert "heads: '4x2'; give query heads / key-value heads, as in 4/2" in capsys.readouterr().err


@pytest.mark.parametrize("case", attention_cases(by_mask, layouts=["intra", "anchor"], **ONE))
def test_the_helper_gives_one_test_a_case(case):
    case.raise_if_different()


def test_the_helper_fails_in_words_and_skips_what_is_lacking():
    fn = attention(lacks="padding", library="torch")(lambda q, k, v, document_ids: 0 * q)
    intra, padded = attention_cases(fn, layouts=["intra", "padded_end"], **ONE)
    assert intra.id == "intra-h4k2d16-float32"
    assert [mark.kwargs["reason"] for mark in padded.marks] == ["lacks padding"]
    with pytest.raises(AssertionError, match="the output is all zeros"):
        intra.values[0].raise_if_different()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_a_document_mask():
    from examples.check_flex_attention import attend as flex

    result = check_attention(flex, layouts=["intra", "padded_end", "rows", "anchor"], heads=[(4, 2)])
    assert result.passed, result.explain()
    assert [r.not_run for r in result.cases] == [None, None, None, "lacks anchor"]


def test_the_example_test_file_passes():
    from examples.test_my_kernel import test_my_kernel

    (mark,) = test_my_kernel.pytestmark
    cases = {parameter.id: parameter.values[0] for parameter in mark.args[1]}
    assert len(cases) == len(LAYOUTS)
    for name in ("anchor", "padded_end", "rows_of_every_kind"):
        test_my_kernel(cases[f"{name}-h4k2d16-float32"])


def test_inputs_are_the_same_everywhere():
    """A case draws what it draws from its own fields, so that a failure elsewhere can be repeated here."""
    from parity_tests.checking.cases import CheckCase

    q, k, v, weight = CheckCase(LAYOUTS["rows"], 4, 2, 16, "float32").draw()
    assert (q.shape, k.shape, v.shape, weight.shape) == ((2, 47, 4, 16), (2, 47, 2, 16), (2, 47, 2, 16), (2, 47, 4, 16))
    assert not np.array_equal(k, v)
