"""What is checked of attention on the stand-in for CUDA; `main` runs all of it in a process that has loaded it.

    main FILE       writes, as JSON, each check's name with the traceback that it ended with, or null

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import json
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from torchtrain.attention import attend, make_plan, resolve_engine
from torchtrain.attention.engines import flash, flex
from torchtrain.tests import test_engines
from torchtrain.tests.cuda import kernels
from torchtrain.tests.layouts import named_batch
from torchtrain.tests.test_engines import attend_with_gradients, draw_qkv
from torchtrain.tests.tiny import refused

CHECKS: dict[str, Callable[[], None]] = {}
BF16 = torch.bfloat16


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function to those that are run."""
    CHECKS[function.__name__] = function
    return function


def main() -> None:
    """Run every check."""
    found = {}
    torch.set_num_threads(1)
    for name, function in CHECKS.items():
        try:
            function()
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


# --- in whatever state ------------------------------------------------------------------------------------------------


@contextmanager
def in_one_order() -> Iterator[None]:
    """As `train.deterministic`, without what cuBLAS needs."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def modules(**found: types.ModuleType) -> Iterator[None]:
    """Let these packages be found, under names in which `__` stands for a dot."""
    flash._import_flash_attn.cache_clear()
    names = [name.replace("__", ".") for name in found]
    before = {name: sys.modules[name] for name in names if name in sys.modules}
    sys.modules.update(zip(names, found.values(), strict=True))  # not patch.dict: what torch imports meanwhile stays
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(before)
        flash._import_flash_attn.cache_clear()


@contextmanager
def gpu(*capability: int) -> Iterator[None]:
    """Let the GPU be another."""
    flash.capability.cache_clear()
    try:
        with patch.object(torch.cuda, "get_device_capability", lambda *_: capability):
            yield
    finally:
        flash.capability.cache_clear()


def flash_attn() -> dict[str, types.ModuleType]:
    """The package, as `modules` takes it."""
    package, interface = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.flash_attn_interface")
    package.__path__ = []  # type: ignore[attr-defined]
    interface.flash_attn_varlen_func = kernels.flash_attn_varlen_func  # type: ignore[attr-defined]
    return {"flash_attn": package, "flash_attn__flash_attn_interface": interface}


def on_cuda(
    engine: str, dtype: torch.dtype, ids_BT: Tensor, device: str = "cuda", **shape: int
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Output and gradients of an engine on the device, and its log-sum-exp; brought to the host."""
    inputs = (x.to(device) for x in draw_qkv(ids_BT, dtype=dtype, **shape))
    got, lse = attend_with_gradients(engine, *inputs, ids_BT.to(device))
    for name, x in (got | ({} if lse is None else {"lse": lse})).items():
        assert x.device == torch.empty(0, device=device).device, name
        assert x.dtype == (torch.float32 if name == "lse" else dtype), name
    return {name: x.cpu() for name, x in got.items()}, None if lse is None else lse.cpu()


def assert_by_the_rule(engine: str, dtype: torch.dtype, ids_BT: Tensor | None = None, **shape: int) -> None:
    """As `test_engines` has it, with the engine on the device and all else on the host."""
    test_engines.assert_by_the_rule(engine, named_batch() if ids_BT is None else ids_BT, dtype, device="cuda", **shape)


# --- engines ----------------------------------------------------------------------------------------------------------


@check
def flash_of_torch() -> None:
    for kv_heads in (1, 2, 4):
        with in_one_order():
            assert_by_the_rule("flash", BF16, kv_heads=kv_heads)


@check
def flash_of_flash_attn() -> None:
    with modules(**flash_attn()), in_one_order():
        called = patch.object(flash, "call_torch_varlen", side_effect=AssertionError("torch's kernel"))
        for kv_heads in (1, 2, 4):
            with called:
                assert_by_the_rule("flash", BF16, kv_heads=kv_heads)


@check
def flex_not_compiled() -> None:
    """All of `flex` but its kernel: FlexAttention's own slow twin runs the block mask, forward and backward."""
    ids_BT = torch.tensor([[0] * 3 + [1] * 90 + [2] * 60 + [-1] * 7, [1] * 160])
    slow = patch.object(flex, "_compiled_flex_attention", lambda: torch.nn.attention.flex_attention.flex_attention)
    with slow, pytest.warns(UserWarning, match="without torch.compile"):
        assert_by_the_rule("flex", torch.float32, ids_BT, head_dim=16)


# --- devices ----------------------------------------------------------------------------------------------------------


@check
def devices_do_not_mix() -> None:
    ids_BT = named_batch()
    q, k, v, _ = (x.cuda() for x in draw_qkv(ids_BT, dtype=BF16))
    for engine in ("flash", "sdpa", "dense"):
        assert "use plan.to(device)" in refused(lambda engine=engine: attend(q, k, v, make_plan(ids_BT), engine=engine))
        for other in (k.cpu(), k.to("cuda:1")):
            with pytest.raises(RuntimeError, match="same device"):
                attend(q, other, v, ids_BT.cuda(), engine=engine)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.ones(1, device="cuda:4")


# --- which kernel -----------------------------------------------------------------------------------------------------


@check
def sdpa_never_takes_the_kernel_that_holds_all_pairs() -> None:
    ids_BT = named_batch()
    said = refused(lambda: on_cuda("sdpa", torch.float64, ids_BT))
    assert "no kernel for torch.float64" in said
    assert "no kernel for torch.float32 and head_dim 6" in refused(
        lambda: on_cuda("sdpa", torch.float32, ids_BT, head_dim=6)
    )
    assert torch.backends.cuda.math_sdp_enabled()  # the program's own setting is left alone
    with gpu(7, 5):
        assert_by_the_rule("sdpa", torch.float16)


@check
def auto_takes_flash_from_ampere_on() -> None:
    for major, dtype, chosen in ((8, BF16, "flash"), (8, torch.float32, "sdpa"), (7, torch.float16, "sdpa")):
        with gpu(major, 0):
            assert resolve_engine("auto", "cuda", dtype) == chosen
    with gpu(7, 5):
        assert "older than sm80" in refused(lambda: resolve_engine("flash", "cuda", BF16))
    assert "float32" in refused(lambda: resolve_engine("flash", "cuda", torch.float32))


@check
def a_broken_flash_attn_falls_over_when_the_engine_is_chosen() -> None:
    package = flash_attn()["flash_attn"]

    class Broken:
        """Finds an interface that cannot be imported."""

        def __init__(self, error: Exception) -> None:
            self.error = error

        def find_spec(self, name: str, *_: object) -> None:
            if name == "flash_attn.flash_attn_interface":
                raise self.error

    for error in (
        ImportError("libcudart.so.11.0: cannot open\nshared object file"),
        ModuleNotFoundError("No module named 'flash_attn_2_cuda'", name="flash_attn_2_cuda"),
        RuntimeError("undefined symbol: _ZN3c105ErrorC2E"),
    ):
        with modules(flash_attn=package), patch.object(sys, "meta_path", [Broken(error), *sys.meta_path]):
            for engine in ("flash", "auto"):
                said = refused(lambda engine=engine: resolve_engine(engine, "cuda", BF16))
                assert f"cannot be imported: {type(error).__name__}: {str(error).split()[0]}" in said


@check
def newer_generations_that_are_not_there() -> None:
    for engine in ("flash3", "flash4"):
        assert "cannot load it: ModuleNotFoundError" in refused(
            lambda engine=engine: resolve_engine(engine, "cuda", BF16)
        )
        assert "needs a CUDA device" in refused(lambda engine=engine: resolve_engine(engine, "cpu", BF16))
        with gpu(8, 0):
            assert "needs a Hopper" in refused(lambda engine=engine: resolve_engine(engine, "cuda", BF16))
    with gpu(10, 0):
        assert "(compute capability 9.x), " in refused(lambda: resolve_engine("flash3", "cuda", BF16))


@check
def newer_generations() -> None:
    """Through torch's own adapters, with stand-ins of the two packages; one generation a process."""
    for engine, other, packages in (
        ("flash3", "flash4", kernels.flash_attn_3()),
        ("flash4", "flash3", kernels.flash_attn_4()),
    ):
        with modules(**packages):
            try:
                with in_one_order():
                    assert_by_the_rule(engine, BF16)
                assert "one a process" in refused(lambda other=other: resolve_engine(other, "cuda", BF16))
                assert "one a process" in refused(lambda: resolve_engine("flash", "cuda", BF16))
                with modules(**flash_attn()):  # which is not torch's
                    assert resolve_engine("flash", "cuda", BF16) == "flash"
            finally:
                flash.leave_newer()
    assert resolve_engine("flash", "cuda", BF16) == "flash"


# --- the same bits ----------------------------------------------------------------------------------------------------


@check
def a_backward_pass_has_the_same_bits_where_that_is_asked_for() -> None:
    ids_BT = named_batch()
    for engine, packages in (("flash", {}), ("flash", flash_attn()), ("sdpa", {})):
        with modules(**packages):
            dq = [on_cuda(engine, BF16, ids_BT)[0]["dq"] for _ in range(2)]
            assert not torch.equal(*dq), f"{engine}: the stand-in's atomics make no difference"
            with in_one_order():
                dq = [on_cuda(engine, BF16, ids_BT)[0]["dq"] for _ in range(2)]
            assert torch.equal(*dq), engine
