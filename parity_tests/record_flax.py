"""Record what a Flax module computes, array by array, into a safetensors file: the twin of `record.py`.

out = record(module, {"params": params}, "dump.safetensors", batch)
"""

import json
from collections.abc import Mapping, Sequence
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
