"""The judge of other people's attention: right functions pass however they are called, and what is open is asked for.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import functools
import types

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parity_tests.check import Adapter, NotTheSame, attention, check_attention, make_cases, resolve
from parity_tests.checking.cases import LAYOUTS
from parity_tests.tests.attention_by_hand import ONE, Module, by_mask, causal, right, same, with_mask
from torchtrain.attention import attend
from torchtrain.tests.flash_on_cpu import FlashOnCPU

# Short layouts of every kind, and heads in groups of two.
SHORT = [
    name
    for name, layout in LAYOUTS.items()
    if not name.startswith(("off_blocks", "one_long")) and layout.adds <= {"window"}
]
FEW = ["anchor", "rows_of_every_kind", "sliced"]
LAYERS = [name for name, layout in LAYOUTS.items() if layout.adds]


def by_plan(q, k, v, plan, scale):
    return attend(q, k, v, plan, engine="sdpa", scale=scale)[0]


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


RIGHT = {
    "document_ids, with lse": (right, None),
    "plan": (by_plan, None),
    "mask": (by_mask, None),
    "v, k, q and a mask of another name": (by_position, Adapter(documents="mask")),
    "jax": (in_jax, Adapter(library="jax")),
    "module": (Module(), Adapter(library="torch")),
    "partial": (functools.partial(right, scale=0.25), Adapter(library="torch")),
}


pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize("kind", RIGHT)
def test_a_right_function_passes(kind):
    fn, adapter = RIGHT[kind]
    result = check_attention(fn, layouts=FEW, adapter=adapter, heads=[(4, 2)], dtypes=["float32"])
    assert result.passed, result.explain()
    assert "what is invisible has exactly no effect" in result.explain()
    # Some take no scale, and arrays of JAX have no strides.
    assert {case.not_run for case in result.cases} <= {None, "takes no scale", "takes no window", "lacks strides"}


@pytest.mark.sweep  # half a minute of compiling
def test_a_right_function_passes_on_every_short_layout():
    result = check_attention(right, layouts=SHORT, heads=[(4, 2)], dtypes=["float32"])
    assert result.passed, result.explain()
    assert {case.not_run for case in result.cases} <= {None, "takes no window"}


def layered(q: Tensor, k, v, document_ids, sliding_window=None, keep_anchor=False, softcap=None, sinks=None):
    options = {"window": sliding_window, "keep_anchor": keep_anchor, "softcap": softcap, "sinks_H": sinks}
    return attend(q, k, v, document_ids, engine="dense", **options)


def test_windows_caps_and_sinks_are_judged_where_a_function_takes_them():
    result = check_attention(layered, layouts=LAYERS, like="eager", heads=[(4, 2)], dtypes=["float32"])
    assert result.passed, result.explain()
    assert not any(case.not_run for case in result.cases)
    assert {case.layout.name for case in make_cases(resolve(layered))} == set(LAYOUTS)
    assert not {case.layout.name for case in make_cases(resolve(right))} & set(LAYERS)


@pytest.mark.parametrize(
    ("layout", "wrong", "hint"),
    [
        ("windows_apart", lambda given: {"sliding_window": given["sliding_window"] + 1}, "one token too long"),
        ("windows_and_anchor", lambda _: {"keep_anchor": False}, "beyond the window the anchor is hidden"),
        ("softcap", lambda _: {"softcap": None}, "the soft cap is left out"),
        ("sinks", lambda _: {"sinks": None}, "the sinks are left out"),
    ],
)
def test_a_wrong_window_anchor_cap_or_sink_has_its_words(layout, wrong, hint):
    def changed(q: Tensor, k, v, document_ids, sliding_window=None, keep_anchor=False, softcap=None, sinks=None):
        given = {"sliding_window": sliding_window, "keep_anchor": keep_anchor, "softcap": softcap, "sinks": sinks}
        return layered(q, k, v, document_ids, **given | wrong(given))

    result = check_attention(changed, layouts=[layout], heads=[(4, 2)], dtypes=["float32"], like="eager")
    assert result.verdict == "different"
    assert hint in result.explain()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(("dtype", "heads"), [("bfloat16", (4, 4)), ("float32", (4, 1)), ("float16", (4, 1))])
def test_heads_and_dtypes(dtype, heads):
    result = check_attention(by_plan, layouts=["anchor", "rows_of_every_kind"], dtypes=[dtype], heads=[heads])
    assert result.passed, result.explain()


def test_torch_varlen_needs_no_adapter():
    """Packed tensors, lengths and the anchor's rows from the plan; the log-sum-exp [H, N] is asked for by a wrapper."""
    from torch.nn.attention.varlen import varlen_attn

    with FlashOnCPU():
        result = check_attention(varlen_attn, layouts=FEW, dtypes=["bfloat16"], heads=[(4, 2)])
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


# -- declarations ------------------------------------------------------------------------------------------------------


class Helpers:
    by_mask, in_jax = staticmethod(by_mask), staticmethod(in_jax)


helpers = types.ModuleType("helpers")
vars(helpers).update(vars(Helpers), inner=helpers, held=Helpers())


def by_local_import(q, k, v, mask):
    from parity_tests.tests import attention_by_hand

    return attention_by_hand.by_mask(q, k, v, mask, None)


@pytest.mark.parametrize(
    ("fn", "library"),
    [
        (lambda q, k, v, mask: helpers.in_jax(q, k, v, mask, 1.0), "jax"),
        (lambda q, k, v, mask: helpers.inner.by_mask(q, k, v, mask, None), "torch"),
        (lambda q, k, v, mask: helpers.held.in_jax(q, k, v, mask, 1.0), "jax"),
        (lambda q, k, v, mask: Helpers.by_mask(q, k, v, mask, None), "torch"),
        (by_local_import, "torch"),
        (lambda q, k, v, mask: in_jax(q, k, v, mask, 1.0), "jax"),
        (lambda q, k, v, mask: [in_jax(*x) for x in (q, k, v)], "jax"),
        (lambda q, k, v, mask: by_mask(q, k, v, mask, None), "torch"),
        (types.FunctionType((lambda q, k, v, mask: q).__code__, {}), "torch"),  # nothing names a library
    ],
)
def test_the_library_is_read_off_what_a_function_calls(fn, library):
    assert resolve(fn).adapter.library == library


def test_three_full_rows_are_a_layout():
    def two_rows(q, k, v, document_ids, scale):
        full = len(q) > 2 and (document_ids == 1).all()
        return right(q, torch.cat([k[:2], 0 * k[2:]]) if full else k, v, document_ids, scale)

    result = check_attention(two_rows, layouts=["full", "rows", "rows_of_every_kind", "full_rows"], **ONE)
    assert [r.case.layout.name for r in result.failed] == ["full_rows"]


OPEN = {
    "no documents": (lambda q, k, v, lengths: None, None, "declare documents= one of document_ids, plan, mask"),
    "two kinds": (lambda q, k, v, plan, mask: None, None, "takes plan and mask; declare documents="),
    "too few": (lambda q, k: None, None, "takes 2 positional arguments"),
    "two libraries": (lambda q, k, v, mask: jnp.add(torch.add(q, 0), 0), None, "say --library torch or jax"),
    "more than it knows": (lambda q, k, v, mask, alibi: torch.add(q, 0), None, "parameter 'alibi' has no default"),
    "no signature": (F.scaled_dot_product_attention, None, "its signature cannot be read"),
    "packed mask": (right, {"layout": "varlen"}, "varlen goes with cu_seqlens"),
    "torch object in jax": (lambda q, k, v, plan: None, {"library": "jax", "documents": "plan"}, "is a torch object"),
    "not taken": (lambda q, k, v: q, {"documents": "mask"}, "none of its parameters can take it"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_what_a_signature_leaves_open_is_asked_for_in_one_line(kind):
    fn, declared, says = OPEN[kind]
    with pytest.raises(ValueError, match=says) as error:
        check_attention(fn, adapter=Adapter(**declared or {}), **ONE)
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
        ({"lacks": "anchors"}, "did you mean anchor\\?"),
        ({"layout": "TBHD"}, "choose from BTHD, BHTD, varlen"),
        ({"dtypes": "int8"}, "dtypes: 'int8'"),
    ],
)
def test_bad_declarations_are_named(declared, says):
    with pytest.raises(ValueError, match=says):
        attention(**declared)
