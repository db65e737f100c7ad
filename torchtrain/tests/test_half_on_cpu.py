"""Half precision on a CPU, by the error rule, on documents long enough for sums over blocks to show.

Truth is torch's kernel in float64; the allowance is what float32 errs whose results are rounded once, which is less
than FlashAttention-2's roundings make.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from anchorline.tolerance import judge
from torchtrain import exact_products
from torchtrain.attention import attend, make_plan
from torchtrain.attention.engines import half_on_cpu

T, H, K, D = 4096, 2, 1, 16
NAMES = ("out", "dq", "dk", "dv")


def draw(dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v, weight = (torch.randn(1, T, heads, D, generator=generator).to(dtype) for heads in (H, K, K, H))
    return q, k, v, weight


def torch_own(q, k, v):
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def run(attention, q, k, v, weight):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    return dict(zip(NAMES, [out.detach(), *torch.autograd.grad(out, leaves, weight)], strict=True))


@cache
def by_torch(dtype, wide):
    return run(torch_own, *(x.to(wide) for x in draw(dtype)))


def judged(attention, dtype):
    got, truth, reference = run(attention, *draw(dtype)), *(by_torch(dtype, x) for x in (torch.float64, torch.float32))
    name = str(dtype).removeprefix("torch.")
    return {x: judge(got[x].double(), truth[x], reference[x].to(dtype).double(), name) for x in NAMES}


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_float32(dtype, tiles, monkeypatch):
    for module in (half_on_cpu, exact_products):
        monkeypatch.setattr(module, "has_tiles", lambda: tiles)
    plan = make_plan(torch.ones(1, T, dtype=torch.long))
    verdicts = judged(lambda q, k, v: attend(q, k, v, plan, engine="sdpa")[0], dtype)
    assert all(verdict.passed for verdict in verdicts.values()), verdicts


def test_torch_alone_would_not_do():
    """Where this fails, torch sums in float32 by itself, and `half_on_cpu` has no reason left to be."""
    verdicts = judged(torch_own, torch.bfloat16)
    assert [name for name in NAMES if not verdicts[name].passed] == ["dk", "dv"], verdicts


def test_what_is_kept_is_in_half_precision():
    q, k, v, _ = draw(torch.bfloat16)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        half_on_cpu.attend_on_cpu(*(x.transpose(1, 2).requires_grad_() for x in (q, k, v)), scale=D**-0.5)
    assert [x.dtype for x in kept] == [torch.bfloat16] * 4 + [torch.float32]


def precision():
    return torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture
def handed(monkeypatch):
    """Return the shapes and settings under which torch's kernel is called, forwards and backwards, without tiles."""
    calls = []
    for name in ("", "_backward"):
        full = f"_scaled_dot_product_flash_attention_for_cpu{name}"
        kernel = getattr(torch.ops.aten, full)

        def called(*tensors, kernel=kernel, **options):
            calls.append((tensors[0].shape[2], precision()))
            return kernel(*tensors, **options)

        monkeypatch.setattr(torch.ops.aten, full, called)
    for module in (half_on_cpu, exact_products):
        monkeypatch.setattr(module, "has_tiles", lambda: False)
    return calls


def step(tokens):
    x = torch.randn(1, 2, tokens, 16, dtype=torch.bfloat16, requires_grad=True)
    half_on_cpu.attend_on_cpu(x, x, x, 0.25).sum().backward()


def test_a_product_that_is_rounded_is_seen_whatever_the_process_computes_in(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a.bfloat16(), b.bfloat16()).float())
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert not exact_products.keeps_float32.__wrapped__()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("chosen", ["highest", "high", "medium"])
def test_a_setting_of_the_users_is_left_as_it_was(handed, chosen, monkeypatch):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(chosen)
    try:
        step(exact_products.LEAST_TOKENS)

        def fail(*_, **__):
            raise RuntimeError("no kernel")

        monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", fail)
        with pytest.raises(RuntimeError, match="no kernel"):
            step(exact_products.LEAST_TOKENS)
        assert torch.get_float32_matmul_precision() == chosen
    finally:
        torch.set_float32_matmul_precision(before)
