"""A device of shapes only: what is on the host has numbers, what is on the device (torch's `meta`) has none and costs
nothing.

A program runs on it unchanged, at any size, and is watched: the bytes that the device holds, and what lives when they
are most. As on a GPU, operands on two devices are an error. It says nothing of numbers, time, streams, fragments of the
allocator, or a kernel's own workspace. Where the host waits for the device is watched in `tests/cuda`.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from torchtrain.planning.memory import FLASH_BACKWARD, flash_workspace

DEVICE = torch.device("meta")
# Whose lines are named; the last folder is ours alone and names nobody.
_NAMED = ("/torchtrain/", "/deepspeed/", "/transformers/")
_OWN = "/tests/shapes_only/"

aten = torch.ops.aten
# What a kernel asks the device before it can say how long its result is.
_ASKS = {
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.equal),
    *(aten.is_nonzero, aten.bincount, aten._local_scalar_dense),
}
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_COPIES = {aten._to_copy, aten.copy_, aten._copy_from, aten._copy_from_and_resize}


class Place(NamedTuple):
    """A line of this project's; within it, which of a library's lines, if any, did it."""

    file: str
    line: int
    function: str
    within: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}" + (f" ({self.within})" if self.within else "")


class Held(NamedTuple):
    """A block of memory that is alive."""

    size: int  # bytes
    place: Place
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class ShapesOnly(TorchDispatchMode):
    """A context manager that watches tensors on `DEVICE`: `now` and `peak` are bytes, `reset` begins anew."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()
        self._alive: dict[int, Held] = {}
        self._freed: list[tuple[int, Held]] = []
        self._born = 0  # how many blocks were ever made
        self._peak_born = 0
        self._stack = ExitStack()

    def __enter__(self) -> "ShapesOnly":
        self._stack.enter_context(_device_of_shapes())
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        super().__exit__(*args)
        self._stack.close()

    def reset(self) -> None:
        """Watch from now on: forget what was noted, but for what is alive."""
        self.peak, self._peak_born, self._freed = self.now, self._born, []

    def forget(self, x: Tensor) -> None:
        """Do not count a tensor that a program keeps for its shape alone, on torch's `meta` device on a GPU, too."""
        number = self._known[x.untyped_storage()]
        self.now -= self._alive.pop(number).size

    def at_peak(self) -> list[Held]:
        """Return what lived when most was held, the largest first."""
        dead = [held for number, held in self._freed if number <= self._peak_born]
        alive = [held for number, held in self._alive.items() if number <= self._peak_born]
        return sorted(dead + alive, key=lambda held: -held.size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation on shapes, and note what it made."""
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return func(*tree_map_only(Tensor, _stand_in, args), **tree_map_only(Tensor, _stand_in, kwargs))
        packet = func._overloadpacket
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        device = [x for x in tensors if x.is_meta]
        if device:
            if packet in _ASKS:
                return self._answer(packet, args)
            if packet in _COPIES:
                source, target = _copied(packet, args, kwargs)
                if source.is_meta and target.type == "cpu":
                    return self._read(packet, source, args, kwargs)
            else:
                _check_one_device(func, tensors, args)
            if packet in _INDEXED:
                args = (args[0], self._without_masks(args[1]), *args[2:])
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_meta]
        for x in made:
            self._count(x, func)
        if func._schema.name == FLASH_BACKWARD:  # what the kernel holds while it runs
            workspace = torch.empty(flash_workspace(args, 1), dtype=torch.uint8, device="meta")
            self._count(workspace, func)
            del workspace
        return result

    def _answer(self, packet: Any, args: Any) -> Any:
        """Answer as if every number were 1, nothing were wrong, and every answer the longest there could be."""
        x: Tensor = args[0]
        if packet is aten._local_scalar_dense:
            flag = x.dtype in (torch.bool, torch.uint8)  # an overflow, a norm that is not finite
            return False if flag else 1.0 if x.dtype.is_floating_point else 1
        if packet in (aten.equal, aten.is_nonzero):
            return True
        if packet is aten.nonzero:
            return x.new_empty(x.numel(), x.ndim, dtype=torch.long)
        raise NotImplementedError(f"{packet}: asks the device for how long its result is")

    def _read(self, packet: Any, source: Tensor, args: Any, kwargs: Any) -> Tensor:
        """A copy to the host, of ones."""
        if packet is aten._to_copy:
            dtype = kwargs.get("dtype") or source.dtype
            return torch.ones(source.shape, dtype=dtype)
        return args[0].fill_(1) if packet is aten.copy_ else args[1].fill_(1)

    def _without_masks(self, indices: Any) -> list[Any]:
        """Boolean masks as the indices that they stand for, as if all were true."""
        found: list[Any] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                found.append(index)
                continue
            found += [torch.empty(index.numel(), dtype=torch.long, device=DEVICE) for _ in range(index.ndim)]
        return found

    def _count(self, x: Tensor, func: Any) -> None:
        storage = x.untyped_storage()
        if storage in self._known:
            return
        self._born += 1
        self._known[storage] = self._born
        held = Held(storage.nbytes(), _place(), func._schema.name, tuple(x.shape), x.dtype)
        self._alive[self._born] = held
        self.now += held.size
        if self.now > self.peak:
            self.peak, self._peak_born, self._freed = self.now, self._born, []
        weakref.finalize(storage, self._free, self._born)

    def _free(self, number: int) -> None:
        held = self._alive.pop(number, None)
        if held is None:  # forgotten
            return
        self.now -= held.size
        if number <= self._peak_born:
            self._freed.append((number, held))


def _copied(packet: Any, args: Any, kwargs: Any) -> tuple[Tensor, torch.device]:
    """Return what is copied, and to which device."""
    if packet is aten._to_copy:
        return args[0], torch.device(kwargs.get("device") or args[0].device)
    return (args[1], args[0].device) if packet is aten.copy_ else (args[0], args[1].device)


def _check_one_device(func: Any, tensors: list[Tensor], args: Any) -> None:
    """Raise torch's RuntimeError where an operand is on the host; as on a GPU, scalars may be, and indices."""
    may = {id(x) for x in args[1]} if func._overloadpacket in _INDEXED else set()
    if any(not x.is_meta and x.ndim > 0 and id(x) not in may for x in tensors):
        devices = sorted({"the host" if x.device.type == "cpu" else "the device" for x in tensors})
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {' and '.join(devices)}")


def _stand_in(x: Tensor) -> Tensor:
    """What a collective of the fake process group takes for a tensor of the device: it does nothing with it."""
    return torch.empty(0, dtype=x.dtype) if x.is_meta else x


def _place() -> Place:
    frame: Any = sys._getframe(2)
    within = ""
    while frame is not None:
        part, file = _named(frame.f_code.co_filename)
        if part == "torchtrain":
            return Place(file, frame.f_lineno, frame.f_code.co_name, within)
        if part:
            within = within or f"{part}/{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return Place("", 0, "", within)


@cache
def _named(path: str) -> tuple[str, str]:
    """Return of which package that is named a file is, and its path there; empty where it is of none."""
    part = next((part for part in _NAMED if part in path and _OWN not in path), "")
    return part.strip("/"), path.rpartition(part)[2] if part else ""


@contextmanager
def _device_of_shapes() -> Iterator[None]:
    """What torch says of devices by their names, for one more name."""
    from torch.optim import optimizer

    fused = [*optimizer._get_fused_kernels_supported_devices(), DEVICE.type]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

    def has(operation: str, key: str) -> bool:
        return has_kernel(operation, {"META": "Meta"}.get(key, key))

    with (
        patch.object(optimizer, "_get_fused_kernels_supported_devices", lambda: fused),
        patch.object(torch._C, "_dispatch_has_kernel_for_dispatch_key", has),
    ):
        yield
