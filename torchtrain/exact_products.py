"""Which library multiplies float32 matrices inside torch's attention kernel on a CPU: oneDNN, where that is exact.

torch hands a kernel's blocks to MKL, which takes AVX2 on an AMD processor, or to oneDNN when they may be rounded to
bfloat16 first. oneDNN rounds only where the processor multiplies tiles of bfloat16 (AMX); elsewhere the same float32
products come out, about twice as fast on an AMD EPYC with AVX-512 (docs/LOG.md). So it is used where it shows that.

Upstream: aten/src/ATen/native/CPUBlas.cpp (gemm), aten/src/ATen/native/mkldnn/Matmul.cpp (use_mkldnn_bf32_matmul).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import RLock

import torch

LEAST_TOKENS = 512  # of a document: shorter ones lose more by oneDNN's calls than they gain
_ALONE = RLock()  # the setting is the process's, and goes back to what it was


@cache
def has_tiles() -> bool:
    """Whether the processor multiplies tiles of bfloat16."""
    return torch.cpu._is_amx_tile_supported()


@contextmanager
def exact_products(tokens: int) -> Iterator[None]:
    """Have oneDNN multiply in the block, if it does not round here and documents have so many tokens.

    Sums come in another order than MKL's; nothing else differs.
    """
    if tokens < LEAST_TOKENS or has_tiles() or not keeps_float32():
        yield
        return
    with _handed_to_onednn():
        yield


@cache
def keeps_float32() -> bool:
    """Whether oneDNN, allowed to round what it multiplies to bfloat16, leaves it as it is."""
    # As the kernel's blocks, queries by keys and probabilities by values, and small: memory is counted beside it.
    with _handed_to_onednn(), torch.autocast("cpu", enabled=False), torch.no_grad():
        return all(_is_exact(*shape) for shape in ((32, 64, 128), (32, 128, 64)))


def _is_exact(rows: int, inner: int, columns: int) -> bool:
    """Whether a product comes out whose factors and result bfloat16 does not hold and float32 does."""
    # Whatever the process's own dtype and device are.
    fine_MK = torch.full((rows, inner), 1 + 2.0**-20, dtype=torch.float32, device="cpu")
    same_KN = torch.eye(inner, columns, dtype=torch.float32, device="cpu")
    return bool((fine_MK @ same_KN)[:, :inner].eq(1 + 2.0**-20).all())


@contextmanager
def _handed_to_onednn() -> Iterator[None]:
    products = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _ALONE:
        before = products.fp32_precision
        products.fp32_precision = "bf16"
        try:
            yield
        finally:
            products.fp32_precision = before
