"""Activation checkpointing: what of a model's activations is kept for the backward pass, and where.

`true` keeps each layer's input. `keep_attention` also keeps the attention kernel's output and log-sum-exp, about as
much again, so that it does not run a second time. Only results of named operations of torch are kept. torch's own
selective checkpointing allows no other difference between the two passes, in which ZeRO 3 gathers other weights ahead
(2.13).

`offload` keeps a layer's input in page-locked host memory, copied on a stream of its own: out while its layer runs,
back while the next layer has its backward pass. The device holds two at most; the last layer's input does not leave.
The stream that computes waits, not the host. Host memory is taken in blocks of `BLOCK` bytes and kept, because torch
rounds page-locked memory up to a power of two, and its `save_on_cpu` takes new memory each time.

Upstream: torch/utils/checkpoint.py (create_selective_checkpoint_contexts).
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from anchorline.errors import UserError
from torchtrain.attention.engines.cudnn import OPERATION as CUDNN
from torchtrain.attention.engines.flash import uses_flash_attn
from torchtrain.attention.engines.half_on_cpu import CAUSAL
from torchtrain.config import ModelConfig, Recomputation
from torchtrain.modeling.chunks import chunk_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 2**24
_OF_FLASH_ATTN = "flash_attn::_flash_attn_varlen_forward"
KERNELS = frozenset(
    {
        "torch_attn::_varlen_attn",
        _OF_FLASH_ATTN,
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        CUDNN,
        CAUSAL,
    }
)


def save_memory(model: "PreTrainedModel", settings: ModelConfig, most: int | None = None) -> None:
    """Set up activation checkpointing, what it keeps and where, and chunks of layers (`most` as in `chunk_layers`).

    `auto` counts as true. Raises UserError: the model has layers that `model.layer_chunk` does not know, or that cannot
    be recomputed.
    """
    if settings.layer_chunk is not None:
        chunk_layers(model, settings.layer_chunk, most)
    if not settings.activation_checkpointing:
        return
    hand_layers_over(model, settings.recomputation)
    if settings.activation_checkpointing == "offload":
        host = HostMemory()
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = host.checkpoint  # pyright: ignore


def hand_layers_over(model: "PreTrainedModel", recomputation: Recomputation = True) -> None:
    """Let layers hand their forward, while training, to torch's checkpoint. Raises UserError: no layer can."""
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"model.activation_checkpointing: transformers recomputes no layers of {model.config.model_type}; set it "
            "to false, and model.fused to none"
        )
    # Renamed within the versions we support; both take the arguments of torch's checkpoint first.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(checkpointing(recomputation))


def can_keep(engine: str) -> bool:
    """Whether `keep_attention` sees the kernel that this engine runs here."""
    if engine == "flash" and uses_flash_attn():
        return hasattr(torch.ops.flash_attn, _OF_FLASH_ATTN.split("::")[1])
    return engine not in ("flex", "dense")


def check_can_keep(engine: str) -> None:
    """Check `can_keep`. Raises UserError: it does not."""
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
        made = func(*args, **(kwargs or {}))
        if func._schema.name in KERNELS:
            self._kept.append(tree_map_only(Tensor, Tensor.detach, made))
        return made


class _Give(_Keep):
    """Gives what was kept in place of running kernels again, and holds it no longer."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._kept.popleft() if func._schema.name in KERNELS else func(*args, **(kwargs or {}))


def count_host_bytes(model: "PreTrainedModel", tokens: int) -> int:
    """Return what the inputs of a model's layers take of the host for `tokens` tokens, in whole blocks."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers * -(-tokens * model.config.hidden_size * model.dtype.itemsize // BLOCK) * BLOCK


class Lane(Protocol):
    """The stream on which copies run during the computation."""

    def run(self, copy: Callable[[], None]) -> Any:
        """Run a copy after all that was asked for until now; return what `wait` takes."""

    def wait(self, copied: Any) -> None:
        """Let what is asked for from now on come after a copy."""


class CudaLane:
    """A stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def run(self, copy: Callable[[], None]) -> Any:
        """See `Lane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            copy()
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """See `Lane`."""
        torch.cuda.current_stream(self._device).wait_event(copied)


class InOrder:
    """Copies are made at once: on a CPU, and where there are shapes only."""

    def run(self, copy: Callable[[], None]) -> None:
        """See `Lane`."""
        copy()

    def wait(self, copied: Any) -> None:
        """See `Lane`."""


class _Kept:
    """An input: on the device, on the host, or both."""

    def __init__(self, x: Tensor, blocks: list[Tensor]) -> None:
        self.here: Tensor | None = x
        self.shape, self.dtype, self.device = x.shape, x.dtype, x.device
        self.blocks = blocks
        self.copied: Any = None  # of the copy that was asked for last


class HostMemory:
    """Keeps inputs of layers there; a model's layers share one. lane: default: as the first input's device asks for."""

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane
        self._order: list[weakref.ref[_Kept]] = []  # of the pass, in the order of its layers
        self._free: list[Tensor] = []

    def checkpoint(self, layer: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """Run a layer as `torch.utils.checkpoint.checkpoint` takes it, its input x alone kept, on the host."""
        if not torch.is_grad_enabled():
            return layer(x, *args)
        given, needs = [x], x.requires_grad

        def run(kept: _Kept, _: Tensor) -> Any:
            own = given.pop() if given else self._take(kept).requires_grad_(needs)
            return layer(own, *args)

        # The empty tensor tells which device's random state the layer is computed with again.
        return checkpoint(run, self._keep(x.detach().contiguous()), x.new_empty(0), use_reentrant=False)

    def _keep(self, x: Tensor) -> _Kept:
        if self._lane is None:
            self._lane = CudaLane(x.device) if x.device.type == "cuda" else InOrder()
        self._order = [one for one in self._order if one() is not None]
        before = self._order[-1]() if self._order else None
        if before is not None and before.here is not None:
            self._lane.wait(before.copied)
            before.here = None
        kept = _Kept(x, self._blocks(x))
        self._order.append(weakref.ref(kept))
        weakref.finalize(kept, self._free.extend, kept.blocks).atexit = False
        kept.copied = self._lane.run(lambda: _copy(x, kept.blocks, back=False))
        return kept

    def _take(self, kept: _Kept) -> Tensor:
        """Return an input for its backward pass, and ask for the one before it."""
        assert self._lane is not None, "it was kept"
        self._fetch(kept)
        self._lane.wait(kept.copied)
        x, kept.here = kept.here, None
        assert x is not None, "it was fetched"
        alive = [one for one in (ref() for ref in self._order) if one is not None]
        place = next((number for number, one in enumerate(alive) if one is kept), 0)
        if place:
            self._fetch(alive[place - 1])
        return x

    def _fetch(self, kept: _Kept) -> None:
        if kept.here is None:
            assert self._lane is not None, "it was kept"
            x = kept.here = torch.empty(kept.shape, dtype=kept.dtype, device=kept.device)
            kept.copied = self._lane.run(lambda: _copy(x, kept.blocks, back=True))

    def _blocks(self, x: Tensor) -> list[Tensor]:
        if x.is_meta:
            return []
        needed, pinned = -(-x.nbytes // BLOCK), x.device.type == "cuda"
        while len(self._free) < needed:
            self._free.append(torch.empty(BLOCK, dtype=torch.uint8, pin_memory=pinned))
        return [self._free.pop() for _ in range(needed)]


def _copy(x: Tensor, blocks: list[Tensor], back: bool) -> None:
    """Copy a tensor to the host or back, block by block. Of shapes there is nothing to copy."""
    if x.is_meta:
        return
    flat = x.view(-1).view(torch.uint8)
    for part, block in zip(flat.split(BLOCK), blocks, strict=True):
        if back:
            part.copy_(block[: len(part)], non_blocking=True)
        else:
            block[: len(part)].copy_(part, non_blocking=True)
