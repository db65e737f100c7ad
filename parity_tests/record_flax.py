"""Record what a Flax module computes, array by array, into a safetensors file: the twin of `record.py`.

out = record(module, {"params": params}, "dump.safetensors", batch)          # flax.linen
with record_nnx(model, "dump.safetensors"):                                  # flax.nnx
    model(batch)
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file


def record(
    module: Any, variables: Any, path: str | Path, *args: Any, names: str | Sequence[str] = "*", **kwargs: Any
) -> Any:
    """Apply a linen module, write the output of every submodule, and return what it returns."""
    out, state = module.apply(variables, *args, capture_intermediates=True, mutable=["intermediates"], **kwargs)
    arrays: dict[str, Any] = {}
    _walk(state["intermediates"], "", arrays)
    write(arrays, path, names, order="[]")  # flax keeps them by name
    return out


@contextmanager
def record_nnx(model: Any, path: str | Path, names: str | Sequence[str] = "*") -> Iterator[None]:
    """Write what the submodules of an nnx module put out in the block, which must not be traced, in their order."""
    from flax import nnx

    arrays: dict[str, Any] = {}
    paths = {id(module): ".".join(map(str, where)) for where, module in nnx.iter_modules(model)}
    kinds = {type(module) for _, module in nnx.iter_modules(model)}
    before = {kind: kind.__call__ for kind in kinds if "__call__" in vars(kind)}

    def wrap(kind: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            out = before[kind](self, *args, **kwargs)
            if name := paths.get(id(self)):
                _walk(out, name, arrays)
            return out

        return call

    for kind in before:
        kind.__call__ = wrap(kind)
    try:
        yield
    finally:
        for kind, call in before.items():
            kind.__call__ = call
    write(arrays, path, names)


def write(arrays: Mapping[str, Any], path: str | Path, names: str | Sequence[str] = "*", **metadata: str) -> None:
    """Write named arrays to a file that `parity compare` reads; in this order, unless the metadata say `order="[]"`."""
    patterns = (names,) if isinstance(names, str) else names
    chosen = {n: np.asarray(x) for n, x in arrays.items() if any(fnmatchcase(n, pattern) for pattern in patterns)}
    save_file(chosen, path, metadata={"order": json.dumps(list(chosen))} | metadata)


def _walk(found: Any, name: str, arrays: dict[str, Any]) -> None:
    if isinstance(found, jax.Array):
        number = sum(key == name or key.startswith(f"{name} #") for key in arrays)
        arrays[f"{name} #{number + 1}" if number else name] = found
    elif isinstance(found, Mapping | tuple | list):
        pairs = found.items() if isinstance(found, Mapping) else enumerate(found)
        for key, value in pairs:
            inner = name if key in ("__call__", 0) else f"{name}.{key}".lstrip(".")
            _walk(value, inner, arrays)
