"""Record what a Flax module computes, array by array, into a safetensors file: the twin of `record.py`.

    out = record(model, "dump.safetensors", batch)  # flax.nnx
    out = record(module.bind({"params": params}), "dump.safetensors", batch)  # flax.linen

Layers that run in one `scan` are one array of all layers; what a `jax.jit` inside of the module computes is not seen.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from safetensors.numpy import save_file


def record(module: Any, path: str | Path, *args: Any, names: str | Sequence[str] = "*", **kwargs: Any) -> Any:
    """Call a module, write what every method of its submodules returns, and return what the module returns.

    module: of flax.nnx, or of flax.linen and bound to its variables.
    path: the file.
    args, kwargs: what the module is called with.
    names: patterns of names to record; * is any text.
    """
    if isinstance(module, nnx.Module):
        out, state = nnx.capture(module, nnx.Intermediate, method_outputs=nnx.Intermediate)(*args, **kwargs)
        found: Any = nnx.to_pure_dict(state)
    else:
        module, variables = module.unbind()
        out, state = module.apply(variables, *args, capture_intermediates=True, mutable=["intermediates"], **kwargs)
        found = state["intermediates"]
    arrays: dict[str, Any] = {}
    _walk(found, "", arrays)
    write(arrays, path, names, order="[]")  # flax keeps them by name
    return out


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
        mapping = isinstance(found, Mapping)
        for key, value in found.items() if mapping else enumerate(found):
            own = key == "__call__" if mapping else key == 0  # layer 0 is the key 0 of a mapping
            _walk(value, name or "output" if own else f"{name}.{key}".lstrip("."), arrays)
