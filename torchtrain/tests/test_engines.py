"""Engines against the dense twin in float64, by the error rule; refusals; nothing leaks.

What the oracle says of them stands in parity_tests; here the trainer is tested on its own.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorline.errors import UserError
from anchorline.tolerance import judge
from torchtrain.attention import attend, make_plan, resolve_engine, visible_BTT
from torchtrain.tests.flash_on_cpu import FlashOnCPU
from torchtrain.tests.layouts import document_ids, named_batch
from torchtrain.tests.tiny import refused

NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(scope="module", autouse=True)
def _flash_on_cpu():
    with FlashOnCPU():
        yield


def draw_qkv(ids_BT, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (*ids_BT.shape, heads, head_dim)
    q, k, v, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    return q.to(dtype), k[:, :, :kv_heads].to(dtype), v[:, :, :kv_heads].to(dtype), weight.to(dtype)


def attend_with_gradients(engine, q, k, v, weight, ids_BT, sinks_H=None, **extras):
    leaves = [x.clone().requires_grad_() for x in (q, k, v, *([] if sinks_H is None else [sinks_H]))]
    out, lse = attend(*leaves[:3], ids_BT, engine=engine, sinks_H=leaves[3] if leaves[3:] else None, **extras)
    grads = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    zero = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    return dict(zip((*NAMES, "dsinks"), [out.detach(), *zero], strict=False)), lse


def assert_by_the_rule(engine, ids_BT, dtype, judged_as=None, device="cpu", extras=None, **shape):
    """Truth is dense in float64; the allowance is what dense errs in the candidate's dtype (or in `judged_as`)."""
    judged_as = judged_as or dtype
    q, k, v, weight = draw_qkv(ids_BT, dtype=judged_as, **shape)
    extras = extras or {}
    got, lse = attend_with_gradients(
        engine, *(x.to(device, dtype) for x in (q, k, v, weight)), ids_BT.to(device), **extras
    )
    truth, truth_lse = attend_with_gradients("dense", *(x.double() for x in (q, k, v, weight)), ids_BT, **extras)
    reference, reference_lse = attend_with_gradients("dense", q, k, v, weight, ids_BT, **extras)
    for what in got:
        verdict = judge(got[what].cpu().double(), truth[what], reference[what].double(), str(judged_as).split(".")[1])
        assert verdict.passed, f"{engine} {what}: {verdict}"
    if lse is not None:
        assert judge(lse.cpu(), truth_lse, reference_lse, "float32").passed


SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0])


@pytest.mark.parametrize("engine", ["sdpa", "flash", "dense"])
def test_values_narrower_than_keys(engine):
    """Multi-head latent attention: the same as with values whose missing columns are zero."""
    q, k, v, weight = draw_qkv(named_batch())
    got, _ = attend_with_gradients(engine, q, k, v[..., :4], weight[..., :4], named_batch())
    wide, _ = attend_with_gradients(engine, q, k, v * (torch.arange(8) < 4), weight, named_batch())
    assert all(torch.equal(got[what], wide[what][..., : got[what].shape[-1]]) for what in NAMES)


@given(document_ids(), st.integers(1, 12))
@settings(max_examples=25)
def test_a_window_hides_what_it_hides_from_each_document_alone_behind_the_anchor(ids_BT, window):
    """Wherever in the row a document is stored, and whatever is stored beside it."""
    rule = visible_BTT(ids_BT, window)
    for ids_T, rule_TT in zip(ids_BT, rule, strict=True):
        for document in ids_T[ids_T > 0].unique():
            own = ((ids_T == 0) | (ids_T == document)).nonzero().flatten()
            index = torch.arange(len(own))
            near = (index[None] <= index[:, None]) & (index[:, None] - index[None] < window)
            assert torch.equal(rule_TT[own][:, own], near)


@given(document_ids())
@settings(max_examples=25)
def test_engines_agree_on_any_layout(ids_BT):
    # Where every query sees one key only, dq is 0 by cancellation and so is what the rule allows; an ordinary document
    # beside the random ones gives each array a size of its own. A wrong lowering is an error of order one, so float64
    # is judged by float32's allowance: the search is for layouts, not for the unluckiest rounding.
    ids_BT = torch.cat([ids_BT, torch.full((len(ids_BT), 16), 9)], dim=1)
    for engine in ("sdpa", "flash"):
        for extras in ({}, {"sinks_H": SINKS, "window": 5}):
            assert_by_the_rule(engine, ids_BT, torch.float64, judged_as=torch.float32, extras=extras)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("engine", ["sdpa", "flash", "dense"])
def test_no_gradient_crosses_the_mask(engine, window):
    """The gradient of any query's output with respect to every invisible key and value is exactly zero."""
    ids_BT = named_batch()
    q, k, v, _ = draw_qkv(ids_BT)
    leaves = [k.requires_grad_(), v.requires_grad_()]
    out, _ = attend(q, *leaves, ids_BT, engine=engine, window=window)
    rule = visible_BTT(ids_BT, window)
    for query in range(ids_BT.shape[1]):
        grads = torch.autograd.grad(out[:, query].square().sum(), leaves, retain_graph=True)
        for grad in grads:
            touched = grad.abs().sum((2, 3)) > 0
            assert not (touched & ~rule[:, query]).any(), f"query {query} is moved by a key it must not see"
        assert torch.equal(grads[1].abs().sum((2, 3)) > 0, rule[:, query]), "a visible value does not reach the query"


@pytest.mark.parametrize("stray", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("extras", [{}, {"window": 3}, {"sinks_H": torch.tensor([-1.0, 0.5, 2.0, 0.0])}])
@pytest.mark.parametrize("engine", ["sdpa", "flash", "dense"])
def test_what_padding_holds_reaches_nothing(engine, extras, stray):
    """Neither from queries, keys and values nor from gradients there. 0 times what a mask hides would be NaN."""
    ids_BT = named_batch()
    padding = ids_BT == -1
    assert padding.any()
    arrays = draw_qkv(ids_BT)
    blank, strayed = ([x.masked_fill(padding[..., None, None], fill) for x in arrays] for fill in (0.0, stray))
    want, want_lse = attend_with_gradients(engine, *blank, ids_BT, **extras)
    got, lse = attend_with_gradients(engine, *strayed, ids_BT, **extras)
    assert all(torch.equal(got[name], want[name]) for name in want)
    assert lse is None or torch.equal(lse, want_lse)


def test_a_document_has_the_same_bits_beside_any_other():
    """Documents of other lengths share its batch, or do not: what it is padded to depends on its own length alone."""
    alone = torch.tensor([[0] + [1] * 66])
    crowd = torch.cat([alone[0], *(torch.full((n,), d) for d, n in enumerate((70, 3, 66, 61, 200, 70), start=2))])[None]
    q, k, v, weight = draw_qkv(crowd, dtype=torch.float32)
    beside, _ = attend_with_gradients("sdpa", q, k, v, weight, crowd)
    n = alone.shape[1]
    apart, _ = attend_with_gradients("sdpa", q[:, :n], k[:, :n], v[:, :n], weight[:, :n], alone)
    for what in NAMES:  # token 0 is the anchor, whose keys serve the others, too
        assert torch.equal(beside[what][:, 1:n], apart[what][:, 1:n]), what


def test_what_pads_a_batch_never_leaves_it():
    """Not even from a document that is all NaN, of a length that is padded, in a batch with another."""
    ids_BT = torch.tensor([[1] * 33 + [2] * 34])
    q, k, v, weight = draw_qkv(ids_BT, dtype=torch.float32)
    for x in (q, k, v):
        x[:, :33] = float("nan")
    got, _ = attend_with_gradients("sdpa", q, k, v, weight, ids_BT)
    for what in NAMES:
        assert got[what][:, 33:].isfinite().all()
        assert got[what][:, :33].isnan().any()


def test_auto_takes_sdpa_on_a_cpu_and_flash_only_where_it_runs():
    assert resolve_engine("auto", "cpu", torch.bfloat16) == "sdpa"
    assert resolve_engine("flash", "cpu", torch.bfloat16) == "flash"  # the registered kernel counts


IDS = torch.tensor([[1, 1, 2]])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, k, v: ((q[0], k, v, IDS), {}), "expected q [B, T, H, D]"),
        (lambda q, k, v: ((q, k[:, :2], v[:, :2], IDS), {}), "must share B, T and D"),
        (lambda q, k, v: ((q[:, :, :3], k, v, IDS), {}), "multiple of K"),
        (lambda q, k, v: ((q, k, v, IDS[:, :2]), {}), "document_ids: shape [1, 2]"),
        (lambda q, k, v: ((q, k.float(), v.float(), IDS), {}), "dtypes differ"),
        (lambda q, k, v: ((q, k, v, IDS), {"engine": "flahs"}), "unknown engine"),
        (lambda q, k, v: ((q.requires_grad_(), k, v, IDS), {"engine": "flex"}), "no backward pass on cpu"),
        (lambda q, k, v: ((q, k, v, IDS), {"sinks_H": torch.zeros(2)}), "sinks: shape [2] for 4 query heads"),
        (lambda q, k, v: ((q, k, v, IDS), {"engine": "sdpa", "softcap": 30.0}), "sdpa: does not cap logits"),
        (lambda q, k, v: ((q, k, v, IDS), {"engine": "flash", "softcap": 30.0}), "flash: does not cap logits"),
        (lambda q, k, v: ((q, k, v, IDS), {"window": 2, "keep_anchor": True}), "does not keep the anchor"),
        (lambda q, k, v: ((q, k, v, IDS), {"engine": "flex", "sinks_H": torch.zeros(4)}), "no attention sinks on cpu"),
        (lambda q, k, v: ((q[..., :6], k[..., :6], v[..., :6], IDS), {"engine": "flash"}), "head_dim 6"),
    ],
)
def test_bad_input_is_one_clear_line(change, says):
    q, k, v, _ = draw_qkv(IDS)
    args, options = change(q, k, v)
    assert says in refused(lambda: attend(*args, **options))


def test_dense_refuses_what_it_would_choke_on():
    ids_BT = torch.ones(1, 8193, dtype=torch.long)
    q = torch.zeros(1, 8193, 1, 8)
    with pytest.raises(UserError, match="8193 tokens"):
        attend(q, q, q, make_plan(ids_BT), engine="dense")
