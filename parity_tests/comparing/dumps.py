"""A dump: named arrays in safetensors files, in the order of the computation, read from the disk where they are needed.

A dump is a file, or a folder of files. Files whose arrays have other names are parts of one dump. Where names repeat,
files that have `rank` in their names are the ranks of one computation, all others are steps (`step 3: loss`).
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from anchorline.errors import UserError, did_you_mean, quoted
from anchorline.files import read_json
from parity_tests.report.names import bare, natural, sort_key

MOST_HEADER = 100_000_000  # bytes, as the format's own library allows
_FLOATS = {
    "F64": ("float64", np.float64),
    "F32": ("float32", np.float32),
    "F16": ("float16", np.float16),
    "BF16": ("bfloat16", ml_dtypes.bfloat16),
    "F8_E4M3": ("float8_e4m3", ml_dtypes.float8_e4m3fn),
    "F8_E5M2": ("float8_e5m2", ml_dtypes.float8_e5m2),
}
_EXACT = {f"{sign}{bits}": f"{kind}{bits}" for sign, kind in (("I", "int"), ("U", "uint")) for bits in (8, 16, 32, 64)}
_DTYPES: dict[str, Any] = {code: dtype for code, (_, dtype) in _FLOATS.items()} | _EXACT | {"BOOL": np.bool_}


@dataclass(frozen=True)
class Array:
    """One array of a dump, which is read when `load` is called; float8 and bfloat16 as they are.

    dtype: `float32`, `bfloat16`, ..., or None where it holds integers or booleans.
    """

    dtype: str | None
    load: Callable[[], np.ndarray] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Dump:
    """Named arrays in the order of the computation, and what the file says of the model.

    arrays: for each name the arrays of its ranks; one, where there are no ranks.
    config: the model's config.json, or {}.
    targets: patterns of the names that its map of names can make; none, where there is no map.
    called: option and file of that map, if it is the user's own.
    places: places of names in the order that the metadata or `--order` give; what has none is sorted behind them.
    """

    source: str
    arrays: Mapping[str, Sequence[Array]]
    config: Mapping[str, Any]
    targets: tuple[str, ...] = ()
    called: str = ""
    places: Mapping[str, int] = field(default_factory=dict[str, int])


def open_dump(path: Path, order: Path | None = None, config: Path | None = None) -> Dump:
    """Read the headers of a dump.

    path: a file or a folder.
    order: a file of names, one a line; None takes the order in the file's metadata, else sorts the names.
    config: the model's config.json, where the metadata lack it.
    Raises UserError: there is none, it is damaged, or holds a dtype that nothing here reads.
    """
    files = sorted(path.glob("*.safetensors"), key=natural) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        why = "the folder holds no .safetensors file" if path.is_dir() else "no such file"
        raise UserError(f"dump {quoted(str(path))}: {why}; give a file, or a folder of files")
    parts: list[dict[str, Array]] = []
    metadata: dict[str, str] = {}
    for file in files:
        found, about = _read_header(file)
        parts.append(found)
        metadata |= about
    names = [name for part in parts for name in part]
    arrays: dict[str, list[Array]] = {}
    repeated = len(set(names)) < len(names)
    by_step = repeated and not all("rank" in file.name for file in files)
    for file, part in zip(files, parts, strict=True):
        numbers = [int(number) for number in re.findall(r"\d+", file.stem)] or [file.stem]
        step = f"step {numbers[-1]}: " if by_step else ""
        for name, array in part.items():
            arrays.setdefault(step + name, []).append(array)
    try:
        said = order.read_text(encoding="utf-8").split("\n") if order else json.loads(metadata.get("order", "[]"))
        model = read_json(config, "--config") if config else json.loads(metadata.get("config", "{}"))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"dump {quoted(str(path))}: its order or config cannot be read: {error}") from None
    place = {name: number for number, name in enumerate(said)}
    places = {name: place[bare(name)] for name in arrays if bare(name) in place}
    return Dump(str(path), in_order(arrays, places), model, places=places)


def in_order(arrays: Mapping[str, Sequence[Array]], places: Mapping[str, int]) -> dict[str, Sequence[Array]]:
    """Arrays step by step, in each those that have a place first."""
    keys = {name: sort_key(name) for name in arrays}
    return {
        n: arrays[n] for n in sorted(arrays, key=lambda n: (keys[n][0], n not in places, places.get(n, 0), keys[n]))
    }


def check_fits(option: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raises UserError: a pattern of an option fits no name, such as a name that is misspelt."""
    own = [bare(name) for name in names]
    for pattern in patterns:
        if not any(name == pattern or fnmatchcase(name, pattern) for name in (*names, *own)):
            raise UserError(f"{option} {pattern}: fits no name{did_you_mean(pattern, own)}; mend it, or take it out")


def _read_header(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER):
                raise ValueError("its header does not fit into it")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        arrays = {name: _place(path, length + 8, size, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"dump {quoted(str(path))}: not safetensors, or damaged ({error})") from None
    # The order of the file is that of its bytes: writers sort by dtype and name, so it says nothing.
    return arrays, metadata


def _place(path: Path, start: int, size: int, entry: Mapping[str, Any]) -> Array:
    code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if code not in _DTYPES:
        raise ValueError(f"dtype {code} is unknown here; write {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code])
    count = int(np.prod(shape, dtype=np.int64))
    if count * dtype.itemsize != end - begin or start + end > size:
        raise ValueError("an array reaches beyond its bytes")

    def load() -> np.ndarray:
        if count == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", start + begin, (count,)).reshape(shape)

    return Array(_FLOATS[code][0] if code in _FLOATS else None, load)
