"""Bitwise repeatable steps on a GPU; a CPU's are anyway. FlashAttention's backward pass sums dq with atomics, in any
order, and cuBLAS may choose an algorithm by what else runs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.deterministic

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms in the block if `asked`; an operation that has none raises an error."""
    if not asked:
        yield
        return
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # cuBLAS reads it at first use; torch requires it
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # with warn_only torch's FlashAttention would stay non-deterministic
    settings.fill_uninitialized_memory = False  # no code reads uninitialized memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
