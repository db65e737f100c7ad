"""Every engine against the oracle in float64: outputs, log-sum-exp, dq, dk, dv, by the one rule."""

import pytest
import torch

from anchorline.tolerance import judge
from jaxref.rounding import preset
from parity_tests.tests.engines import compare_engine, draw, run_oracle, run_oracle_by_documents
from torchtrain.attention import attend
from torchtrain.tests.flash_on_cpu import FlashOnCPU
from torchtrain.tests.layouts import named_batch

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", autouse=True)
def _flash_on_cpu():
    with FlashOnCPU():
        yield


def assert_all_pass(verdicts, *expected):
    assert set(expected) <= set(verdicts)
    broken = {name: str(verdict) for name, verdict in verdicts.items() if not verdict.passed}
    assert not broken


def packed(*lengths: int, anchor: int = 1, padding: int = 0) -> torch.Tensor:
    documents = [d for d, n in enumerate(lengths, start=1) for _ in range(n)]
    return torch.tensor([[0] * anchor + documents + [-1] * padding])


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("engine", ["dense", "sdpa", "flash"])
def test_small_layouts_of_every_kind(engine, kv_heads, dtype):
    verdicts = compare_engine(engine, named_batch(), dtype, kv_heads=kv_heads)
    assert_all_pass(verdicts, "out", "dq", "dk", "dv", *([] if engine == "sdpa" else ["lse"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["dense", "sdpa", "flash"])
def test_lengths_that_fit_no_block(engine, dtype):
    ids_BT = torch.cat([packed(130, 1, 257, 61, anchor=3, padding=5), packed(455, anchor=0, padding=2)])
    assert_all_pass(compare_engine(engine, ids_BT, dtype, head_dim=32), "out", "dq", "dk", "dv")


HEADS, KV_HEADS = 32, 8  # the sinks' gradient is one number a head: of four, the mean error is chance
SINKS = torch.linspace(-1, 2, HEADS)
WINDOWED = packed(130, 1, 57, 61, anchor=3, padding=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("engine", "layer"),
    [
        ("dense", {"sinks_H": SINKS, "softcap": 2.0, "window": 20, "keep_anchor": True}),
        ("sdpa", {"sinks_H": SINKS}),
        ("sdpa", {"sinks_H": SINKS, "window": 20}),
        ("flash", {"sinks_H": SINKS}),
        ("flash", {"window": 20}),
        ("flash", {"sinks_H": SINKS, "window": 20}),
    ],
)
def test_sinks_caps_and_windows(engine, layer, dtype):
    expected = ("out", "dq", "dk", "dv", *(["dsinks"] if "sinks_H" in layer else []))
    assert_all_pass(compare_engine(engine, WINDOWED, dtype, heads=HEADS, kv_heads=KV_HEADS, **layer), *expected)


def test_flex_forward_on_a_cpu():
    """In bf16 only: torch's compiled CPU kernel takes a 20-bit exponential, beyond float32's allowance."""
    ids_BT = packed(130, 1, 57, 61, anchor=3, padding=5)
    assert_all_pass(compare_engine("flex", ids_BT, torch.bfloat16, backward=False), "out")
    padding = (ids_BT == -1)[..., None, None]
    q, k, v = (x.masked_fill(padding, torch.nan) for x in draw(ids_BT, 4, 2, 16, torch.bfloat16)[:3])
    assert attend(q, k, v, ids_BT, engine="flex")[0].isfinite().all()


def test_the_oracle_by_documents():
    """The two differ by the order of sums in float64, judged by what float32 errs."""
    ids_BT = packed(8, 8, anchor=2, padding=2)
    drawn = draw(ids_BT, 4, 2, 16, torch.float32)
    whole, coarse = (run_oracle(preset(name), *drawn, ids_BT) for name in ("exact", "fp32"))
    for name, x in run_oracle_by_documents(preset("exact"), *drawn, ids_BT).items():
        assert judge(x, whole[name], coarse[name], "float32").passed, name


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize("engine", ["flash", "flex", "sdpa", "dense"])
def test_engines_on_a_gpu_in_bf16(engine, kv_heads):
    ids_BT = torch.cat([packed(700, 1, 129, 1000, 200, anchor=5, padding=13), packed(2040, anchor=1, padding=7)])
    verdicts = compare_engine(
        engine, ids_BT, torch.bfloat16, heads=8, kv_heads=kv_heads, head_dim=64, query_block=512, device="cuda"
    )
    assert_all_pass(verdicts, "out", "dq", "dk", "dv")


ALL = {"sinks_H": SINKS, "softcap": 2.0, "window": 300, "keep_anchor": True}
ON_A_GPU = {
    "flash": ({"sinks_H": SINKS}, {"window": 300}, {"sinks_H": SINKS, "window": 300}),
    "sdpa": ({"sinks_H": SINKS}, {"sinks_H": SINKS, "window": 300}),
    "flex": (ALL, {"window": 300}),
    "dense": (ALL,),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "layer"), [(engine, layer) for engine in ON_A_GPU for layer in ON_A_GPU[engine]])
def test_sinks_caps_and_windows_on_a_gpu(engine, layer):
    ids_BT = packed(700, 1, 129, 1000, 200, anchor=5, padding=13)
    layer = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in layer.items()}
    verdicts = compare_engine(
        engine, ids_BT, torch.bfloat16, heads=HEADS, kv_heads=KV_HEADS, head_dim=64, device="cuda", **layer
    )
    assert_all_pass(verdicts, "out", "dq", "dk", "dv", *(["dsinks"] if "sinks_H" in layer else []))


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["flex", "sdpa"])
def test_engines_on_a_gpu_in_fp32(engine):
    ids_BT = packed(300, 1, 129, 500, 80, anchor=5, padding=9)
    assert_all_pass(compare_engine(engine, ids_BT, torch.float32, head_dim=64, device="cuda"), "out", "dq", "dk", "dv")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [4096, 32768])
@pytest.mark.parametrize("engine", ["flash", "flex", "sdpa"])
def test_long_rows_on_a_gpu(engine, length):
    """Anchor over documents of very different lengths, and one document as long as the row."""
    half = length // 2
    anchored = packed(half, 1, half // 2, half // 4, half // 4 - 2 - 7, anchor=1, padding=7)
    ids_BT = torch.cat([anchored, torch.ones(1, anchored.shape[1], dtype=torch.long)])
    verdicts = compare_engine(
        engine, ids_BT, torch.bfloat16, heads=4, kv_heads=2, head_dim=128, query_block=512, device="cuda"
    )
    assert_all_pass(verdicts, "out", "dq", "dk", "dv")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [32_768, 65_536, 131_072])
@pytest.mark.parametrize("engine", ["flash", "flex", "sdpa"])
def test_documents_of_long_rows_on_a_gpu(engine, length):
    """Documents of two lengths, so that the oracle compiles two programs and no more."""
    ids_BT = packed(*[2047, 1024] * ((length - 1) // 3071), anchor=1)
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 128, "query_block": 512, "ask": run_oracle_by_documents}
    verdicts = compare_engine(engine, ids_BT, torch.bfloat16, device="cuda", **sizes)
    assert_all_pass(verdicts, "out", "dq", "dk", "dv")
