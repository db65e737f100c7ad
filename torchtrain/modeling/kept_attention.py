"""`model.activation_checkpointing: keep_attention`: layers are computed again in the backward pass, all but attention.

Of each layer its input is kept, as always, and what the attention kernel returned: its output and log-sum-exp, about as
much again. The kernel is then not run a second time, which of a long row under `full` is most of a layer's work.
Everything else is computed again, so that the kernel's backward pass gets the q, k and v that it had: the same bits.

Kept is what named operations of torch return; a kernel that is none, or that torch.compile makes, is not seen. torch's
own selective checkpointing does the same, and lets nothing else differ between the two passes, in which ZeRO 3 gathers
other weights ahead (torch 2.13).

Upstream: torch/utils/checkpoint.py (create_selective_checkpoint_contexts).
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from anchorline.errors import UserError
from torchtrain.attention.flash import uses_flash_attn
from torchtrain.attention.half_on_cpu import CAUSAL
from torchtrain.config import Recomputation

SHAPES = "anchorline::kernel_of_shapes"  # `torchtrain.planning.memory` counts with it
_OF_FLASH_ATTN = "flash_attn::_flash_attn_varlen_forward"
KERNELS = frozenset(
    {
        "torch_attn::_varlen_attn",
        _OF_FLASH_ATTN,
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        CAUSAL,
        SHAPES,
    }
)


def can_keep(engine: str) -> bool:
    """Whether the kernel of an engine that runs here is seen."""
    if engine == "flash" and uses_flash_attn():
        return hasattr(torch.ops.flash_attn, _OF_FLASH_ATTN.split("::")[1])
    return engine not in ("flex", "dense")


def check_can_keep(engine: str) -> None:
    """Check `can_keep`.

    Raises:
        UserError: it does not.
    """
    if not can_keep(engine):
        why = "needs flash-attn 2.7 or newer" if engine == "flash" else "keeps nothing of this engine"
        raise UserError(
            f"model.activation_checkpointing keep_attention: {why} (attention {engine}); set it to true, which "
            "computes attention again, too"
        )


def checkpointing(recomputation: Recomputation) -> dict[str, Any]:
    """Return how torch's checkpoint is called: its keyword arguments."""
    kept = {"context_fn": _contexts} if recomputation == "keep_attention" else {}
    return {"use_reentrant": False} | kept


def _contexts() -> "tuple[_Keep, _Give]":
    """Return what is entered for a layer's forward pass, and for the second one."""
    kept: deque[Any] = deque()
    return _Keep(kept), _Give(kept)


class _Keep(TorchDispatchMode):
    """Keeps what kernels return, in order."""

    def __init__(self, kept: deque[Any]) -> None:
        super().__init__()
        self._kept = kept

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let compiled parts of a layer run as they are."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        made = func(*args, **(kwargs or {}))
        if func._schema.name in KERNELS:
            self._kept.append(tree_map_only(Tensor, Tensor.detach, made))
        return made


class _Give(_Keep):
    """Gives what was kept in place of running kernels again, and holds it no longer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, or give what it returned."""
        return self._kept.popleft() if func._schema.name in KERNELS else func(*args, **(kwargs or {}))
