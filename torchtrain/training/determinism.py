"""The same bits again on a GPU: what a step adds up in no fixed order unless it is told to.

FlashAttention's backward pass (of flash-attn, of torch, and of `scaled_dot_product_attention`) adds dq up with atomics;
cuBLAS may choose by what else runs. A CPU gives the same bits whatever stands here.
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
    """While the block lasts, add everything up in one order, if that is asked for; it is torch's switch, for all of
    torch.

    An operation that has no such order raises and names itself.

    Args:
        asked: `train.deterministic`.
    """
    if not asked:
        yield
        return
    workspace = os.environ.get(_WORKSPACE)
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # torch refuses cuBLAS without; read at its first use
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # not warn_only, which torch's FlashAttention takes for no
    settings.fill_uninitialized_memory = False  # nothing is read that was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)
