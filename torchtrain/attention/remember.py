"""Keeps what was read of a tensor with that tensor."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

_Value = TypeVar("_Value")


def remember(name: str, tensor: Tensor, make: Callable[[], _Value]) -> _Value:
    """Return the result of `make`, kept on this tensor until it changes (`_version`; of an inference tensor a copy)."""
    kept: tuple[int | Tensor, _Value] | None = getattr(tensor, name, None)
    if kept is not None and _is_unchanged(tensor, kept[0]):
        return kept[1]
    value = make()
    setattr(tensor, name, (tensor.clone() if tensor.is_inference() else tensor._version, value))
    return value


def _is_unchanged(tensor: Tensor, version: int | Tensor) -> bool:
    return tensor.equal(version) if isinstance(version, Tensor) else tensor._version == version
