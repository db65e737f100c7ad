"""A dump: named arrays in safetensors files, in the order of the computation, read from the disk where they are needed.

A dump is a file, or a folder of files. Files whose arrays have other names are parts of one dump. Where names repeat,
files called `rank0` (or `tp0`, `pp0`), ... are the ranks of one computation, files that differ in one other number are
steps (`step 3: loss`), also of ranks.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from anchorline.errors import UserError, did_you_mean, printable, quoted, some
from anchorline.files import parse_json, read_json
from parity_tests.report.names import bare, natural, sort_key, whole

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
    rank: of the dump's ranks that which holds it.
    """

    dtype: str | None
    load: Callable[[], np.ndarray] = field(repr=False, compare=False)
    rank: int = 0


@dataclass(frozen=True)
class Dump:
    """Named arrays in the order of the computation, and what the file says of the model.

    arrays: for each name the arrays of its ranks; one, where there are no ranks.
    config: the model's config.json, or {}.
    targets: patterns of the names that its map of names can make; none, where there is no map.
    called: option and file of that map, if it is the user's own.
    places: places of names in the order that the metadata or `--order` give; what has none is sorted behind them.
    steps: numbers of its steps, if it has any.
    notes: what a reader of the verdict must know of it.
    """

    source: str
    arrays: Mapping[str, Sequence[Array]]
    config: Mapping[str, Any]
    targets: tuple[str, ...] = ()
    called: str = ""
    places: Mapping[str, int] = field(default_factory=dict[str, int])
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()


def open_dump(path: Path, order: Sequence[str] = (), config: Path | None = None) -> Dump:
    """Read the headers of a dump.

    path: a file or a folder.
    order: names; where there are none, the order in the file's metadata is taken, else the names are sorted.
    config: the model's config.json, where the metadata lack it.
    Raises UserError: there is none, it is damaged, or holds a dtype that nothing here reads.
    """
    opening = f"dump {quoted(str(path))}"
    files = sorted(path.glob("*.safetensors"), key=natural) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        why = "the folder holds no .safetensors file" if path.is_dir() else "no such file"
        raise UserError(f"{opening}: {why}; give a file, or a folder of files")
    headers = [_read_header(file) for file in files]
    parts = [part for part, _ in headers]
    names = [name for part in parts for name in part]
    runs = _runs(opening, files, len(set(names)) < len(names)) if path.is_dir() else [(None, 0)]
    if not names:
        raise UserError(f"{opening}: holds no array")
    said = order or [name for _, about in headers for name in about["order"]]
    model = read_json(config, "--config") if config else {k: x for _, a in headers for k, x in a["config"].items()}
    place = {name: number for number, name in enumerate(dict.fromkeys(said))}
    arrays: dict[str, list[Array]] = {}
    places: dict[str, int] = {}
    for (step, rank), part in zip(runs, parts, strict=True):
        for name, array in part.items():
            label = name if step is None else f"step {step}: {name}"
            arrays.setdefault(label, []).append(replace(array, rank=rank))
            places |= {label: place[name]} if name in place else {}
    steps = tuple(dict.fromkeys(step for step, _ in runs if step is not None))
    return Dump(printable(str(path)), in_order(arrays, places), model, places=places, steps=steps)


def in_order(arrays: Mapping[str, Sequence[Array]], places: Mapping[str, int]) -> dict[str, Sequence[Array]]:
    """Arrays step by step, in each those that have a place first."""
    keys = {name: sort_key(name) for name in arrays}
    return {
        n: arrays[n] for n in sorted(arrays, key=lambda n: (keys[n][0], n not in places, places.get(n, 0), keys[n]))
    }


def _runs(opening: str, files: Sequence[Path], repeated: bool) -> list[tuple[int | None, int]]:
    """Step and rank of each file of a folder. Step None: there are no steps. Raises UserError."""
    stems, ranks = [file.stem for file in files], [()] * len(files)
    for word in ("(?<![a-z])[tpd]p", "rank")[not repeated :]:  # of tensor, pipeline and data parallel; or of all
        number = re.compile(rf"{word}[-_. =]*(\d+)", re.IGNORECASE)
        own = [tuple(map(int, number.findall(file.stem))) for file in files]
        if len({*own}) > 1 or len(files) == 1:  # what is the same in all names is no rank
            stems, ranks = [number.sub("", file.stem) for file in files], own
    if all(ranks):
        wanted = product(*(range(min(max(own), len(own)) + 1) for own in zip(*ranks, strict=False)))
        for rank in wanted:
            if rank not in ranks:
                raise UserError(f"{opening}: lacks rank {', '.join(map(str, rank))}; give a file of each, from 0 on")
    if not repeated or (all(ranks) and len(set(ranks)) == len(ranks)):
        return [(None, rank) for rank in range(len(files))]
    steps = [int(step) for stem in stems for step in re.findall(r"(\d+)\D*$", stem)]
    alike = len({re.sub(r"\d+(?=\D*$)", "", stem) for stem in stems}) == 1
    runs = {*zip(steps, ranks, strict=False)}
    if not alike or not len(files) == len(steps) == len(runs) == len({*steps}) * len({*ranks}):
        how = "rank0, ..., or step0, ..., or step0_rank0, ... for every rank of every step"
        raise UserError(f"{opening}: {some([file.name for file in files])} hold the same names; call them {how}")
    return [(step, sorted({*ranks}).index(rank)) for step, rank in zip(steps, ranks, strict=True)]


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name, or what stands behind its step, fits a pattern; * is any text, brackets are themselves, too."""
    forms = {form for pattern in patterns for form in (pattern, pattern.replace("[", "[[]"))}
    behind = name.partition(": ")[2:]
    return any(fnmatchcase(own, form) for own in (name, *behind, bare(name)) for form in forms)


def choose(names: Iterable[str], only: Sequence[str]) -> list[str]:
    """The names that fit one of the patterns, all where there is none, and none that begins with `!`."""
    without = [pattern[1:] for pattern in only if pattern.startswith("!")]
    wanted = [pattern for pattern in only if not pattern.startswith("!")] or ["*"]
    return [name for name in names if fits(name, wanted) and not fits(name, without)]


def check_fits(option: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Raises UserError: a pattern of an option fits no name, such as a name that is misspelt."""
    own = [bare(name) for name in names]
    for pattern in patterns:
        wanted = pattern[1:] if pattern.startswith("!") else whole(pattern)
        if not any(fits(name, [wanted]) for name in names):
            raise UserError(f"{option} {pattern}: fits no name{did_you_mean(wanted, own)}; mend it, or take it out")


def check_alike(truth: Dump, *others: Dump | None) -> None:
    """Raises UserError: one of two dumps has steps, or the truth's ranks are not as many as another's."""
    for other in filter(None, others):
        mine, true = (max(map(len, dump.arrays.values())) for dump in (other, truth))
        if bool(other.steps) != bool(truth.steps) or true not in (1, mine):
            sides = ((other, mine), (truth, true))
            said = [f"{dump.source} holds {len(dump.steps) or 'no'} steps and {n} ranks" for dump, n in sides]
            raise UserError(f"{', '.join(said)}; give as many on both sides; ranks have `rank` in their files' names")


def _read_header(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of a file, and what its metadata say: `order` and `config`."""
    opening = f"dump {quoted(str(path))}"
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(size - 8, MOST_HEADER):
                raise ValueError("its header does not fit into it")
            header = parse_json(file.read(length))
        metadata = {**header.pop("__metadata__", {})}
        about = {key: _said(metadata, key, kind) for key, kind in (("order", list), ("config", dict))}
        arrays = {name: _place(name, path, length + 8, size, entry) for name, entry in header.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        lines = "; JSONL of log-probabilities needs --logprobs" if path.suffix == ".jsonl" else ""
        raise UserError(f"{opening}: not safetensors, or damaged ({error}){lines}") from None
    # The order of the file is that of its bytes: writers sort by dtype and name, so it says nothing.
    return arrays, about


def _said(metadata: dict[str, Any], key: str, kind: Any) -> Any:
    try:
        value = json.loads(metadata[key]) if key in metadata else kind()
    except (ValueError, TypeError, RecursionError):
        value: Any = None
    if not isinstance(value, kind) or not all(isinstance(name, str) for name in value):
        raise ValueError(f"{key} in its metadata is {quoted(metadata[key])}, and no {kind.__name__} of names as JSON")
    return value


def _place(name: str, path: Path, start: int, size: int, entry: Mapping[str, Any]) -> Array:
    name.encode()  # fails on half a character, which JSON may hold
    code, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if code not in _DTYPES:
        raise UserError(f"dump {path}: {name} is of dtype {code}; write one of {', '.join(_DTYPES)}")
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"{name} has shape {list(shape)}")
    dtype, count = np.dtype(_DTYPES[code]), math.prod(shape)
    if count * dtype.itemsize != end - begin or start + end > size:
        raise ValueError("an array reaches beyond its bytes")

    def load() -> np.ndarray:
        if count == 0:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", start + begin, (count,)).reshape(shape)

    return Array(_FLOATS[code][0] if code in _FLOATS else None, load)
