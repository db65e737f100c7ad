"""What a recomputed layer keeps, its input, in host memory from its forward pass to its backward pass.

Beside what the device computes, on a stream of its own, an input goes to page-locked memory while its layer runs, and
comes back while the layer after it has its backward pass. The device holds two at most: the one in use and the one on
its way. The last layer's is needed first and has not left.

Every copy runs on one stream, in order, so memory of the host is free for the next copy once the last has been asked
for. Who computes waits (the stream does, not the host): for a copy to the host before its input is dropped, whose
memory the next operation may take, and for a copy from the host before the input is used; each copy begins after all
that was asked of the device before.

Memory of the host is taken in blocks of `BLOCK` bytes and kept for the next pass: torch rounds what is page-locked up
to a power of two, and an input of 1.5M tokens is not one.
"""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BLOCK = 2**24


def count_host_bytes(model: "PreTrainedModel", tokens: int) -> int:
    """Return what the inputs of a model's layers take of the host for `tokens` tokens, in whole blocks."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = sum(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers * -(-tokens * model.config.hidden_size * model.dtype.itemsize // BLOCK) * BLOCK


class Lane(Protocol):
    """Where copies run beside what is computed."""

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
    """Keeps inputs of layers there; see above. A model's layers share one.

    Args:
        lane: default: the one that the device of the first input asks for.
    """

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane
        self._order: list[weakref.ref[_Kept]] = []  # of the pass, in the order of its layers
        self._free: list[Tensor] = []

    def checkpoint(self, layer: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """Run a layer and keep its input alone, on the host; in its backward pass it is computed again.

        Args:
            layer: as `torch.utils.checkpoint.checkpoint` takes it.
            x: what it takes first, the output of another layer.
            *args: what else it takes, which is kept where it is.
        """
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
        if (before := self._last()) is not None and before.here is not None:
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

    def _last(self) -> _Kept | None:
        return self._order[-1]() if self._order else None

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
