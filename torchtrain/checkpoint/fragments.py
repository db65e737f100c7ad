"""The state of a run, cut into fragments that any layout of processes can write and read.

A fragment is a range of one flattened parameter with its master weights and AdamW's two moments. Each rank writes
fragments it holds; whoever reads takes from all files what overlaps with the fragments it holds itself. So nothing is
ever gathered, and the number of ranks may change between writing and reading.

On disk: `state-RRRRR-NNN.safetensors`, rank and number; a tensor's name is `KIND:START:PARAMETER`. The bytes are those
of `safetensors.torch.save`, written from where the tensors lie: it would hold the interpreter while it copies them, and
with it the training that goes on meanwhile.

Legend: n elements of a fragment.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from anchorline.files import FileEntry, parse_json, write_file
from torchtrain.checkpoint.manifest import DamageError

_Buffer = TypeVar("_Buffer", bytearray, memoryview)

KINDS = ("master", "exp_avg", "exp_avg_sq")
# Bytes of a file, and so of the copy in host memory while it is written, of a state that is elsewhere.
FILE_BYTES = 1 << 29


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + n) of a flattened parameter; `tensors` are views [n] of the strategy's, by kind."""

    parameter: str
    start: int
    tensors: Mapping[str, Tensor]

    @property
    def stop(self) -> int:
        """One past the last element."""
        return self.start + len(self.tensors["master"])

    def cut(self, start: int, stop: int) -> "Fragment":
        """Return a part, in elements of the parameter."""
        assert self.start <= start <= stop <= self.stop
        views = {kind: x_n[start - self.start : stop - self.start] for kind, x_n in self.tensors.items()}
        return Fragment(self.parameter, start, views)

    def copy(self) -> "Fragment":
        """Return a copy in host memory."""
        copies = {kind: x_n.detach().to("cpu", copy=True) for kind, x_n in self.tensors.items()}
        return Fragment(self.parameter, self.start, copies)


def share(fragments: Sequence[Fragment], part: int, parts: int) -> list[Fragment]:
    """Return one of `parts` equal shares: what a rank writes of that which every rank holds."""
    total = sum(fragment.stop - fragment.start for fragment in fragments)
    first, last = (total * i // parts for i in (part, part + 1))
    found, before = [], 0
    for fragment in fragments:
        size = fragment.stop - fragment.start
        start, stop = max(first - before, 0), min(last - before, size)
        if start < stop:
            found.append(fragment.cut(fragment.start + start, fragment.start + stop))
        before += size
    return found


def write(folder: Path, fragments: Iterable[Fragment], rank: int) -> dict[str, FileEntry]:
    """Write fragments into files of about `FILE_BYTES`; return each file's name with what it is.

    Raises:
        OSError: what the system says, such as a full disk.
    """
    entries: dict[str, FileEntry] = {}
    for number, tensors in enumerate(_files(fragments)):
        name = f"state-{rank:05d}-{number:03d}.safetensors"
        entries[name] = write_file(folder / name, _header(tensors), *(_bytes(tensors[key]) for key in sorted(tensors)))
    return entries


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return what opens a safetensors file of float32 tensors [n], which stand in it by the order of their names."""
    place, entries = 0, {}
    for key in sorted(tensors):
        assert tensors[key].dtype == torch.float32, f"{key} is {tensors[key].dtype}"
        end = place + tensors[key].nbytes
        entries[key] = {"dtype": "F32", "shape": list(tensors[key].shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(x_n: Tensor) -> memoryview:
    """Return the bytes of a tensor [n] in host memory, where they lie."""
    return x_n.numpy().data.cast("B")


def check_whole(parameters: Mapping[str, Sequence[int]], written: Iterable[Mapping[str, int]]) -> None:
    """Check that the elements that all ranks wrote, by parameter, add up to the parameters."""
    total = dict.fromkeys(parameters, 0)
    for counts in written:
        for name, count in counts.items():
            total[name] += count
    assert total == {name: prod(shape) for name, shape in parameters.items()}


def elements(fragments: Iterable[Fragment]) -> dict[str, int]:
    """Return the number of elements of each parameter that fragments hold."""
    found: dict[str, int] = {}
    for fragment in fragments:
        found[fragment.parameter] = found.get(fragment.parameter, 0) + fragment.stop - fragment.start
    return found


def nearest(names: Iterable[str], writers: int, reader: int, readers: int) -> list[str]:
    """Return the names of files in the order in which a rank finds its part: ranks hold a state in their order, so what
    the writer at the same share of the way wrote comes first.

    Args:
        names: of files of any rank.
        writers: how many ranks wrote.
        reader: the rank that reads.
        readers: how many do.
    """

    def distance(name: str) -> float:
        return abs((2 * rank_of(name) + 1) * readers - (2 * reader + 1) * writers)

    return sorted(names, key=lambda name: (distance(name), name))


def rank_of(name: str) -> int:
    """Return the rank that wrote a file of a checkpoint."""
    return int(name.split("-")[1].partition(".")[0])


@torch.no_grad()
def read(paths: Iterable[Path], fragments: Sequence[Fragment]) -> None:
    """Fill fragments from the files of any layout. Of each file only what they lack is read; once they are full, no
    other is opened.

    Raises:
        DamageError: a file is none of ours, or the files do not hold all elements.
    """
    wanted: dict[str, list[Fragment]] = {}
    for fragment in fragments:
        wanted.setdefault(fragment.parameter, []).append(fragment)
    missing = {kind: elements(fragments) for kind in KINDS}
    folder = Path()
    for path in paths:
        if not any(count for counts in missing.values() for count in counts.values()):
            return
        folder = path.parent
        try:
            with _StateFile(path) as file:
                for key in file.places:
                    kind, start, parameter = _parse(key)
                    for fragment in wanted.get(parameter, []):
                        missing[kind][parameter] -= _fill(fragment, kind, start, file, key)
        except (ValueError, LookupError, TypeError) as error:
            raise DamageError(f"{path}: is not a state file of ours ({error})") from None
    for kind, counts in missing.items():
        for parameter, count in counts.items():
            if count:
                raise DamageError(f"{folder}: {count} elements of {kind} of {parameter} are in none of its files")


class _StateFile:
    """A file that `write` wrote, a context manager.

    Ranges are read, and not mapped as safetensors' own reader does: of a mapped file the system brings in the
    neighbourhood of each page that is looked at, megabytes for a header.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Self:
        self._handle = os.open(self._path, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # macOS has none
                os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_RANDOM)  # nothing is wanted ahead
            length = int.from_bytes(self._read(0, bytearray(8)), "little")
            if not length <= os.fstat(self._handle).st_size - 8:
                raise ValueError("its header is cut off")
            header = parse_json(bytes(self._read(8, bytearray(length))))
            self.places = {key: self._place(8 + length, key, entry) for key, entry in header.items()}
        except BaseException:
            os.close(self._handle)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)

    @staticmethod
    def _place(start: int, key: str, entry: Any) -> tuple[int, int]:
        """Return where a tensor begins in the file, and its elements."""
        (length,) = entry["shape"]
        first, last = entry["data_offsets"]
        if entry["dtype"] != "F32" or last - first != 4 * length:
            raise ValueError(f"{key} is {entry['dtype']} in {last - first} bytes and not {length} of float32")
        return start + first, length

    def fill(self, key: str, first: int, target_n: Tensor) -> None:
        """Fill a float32 tensor [n] with the elements of the file's from `first` on."""
        here_n = target_n if target_n.device.type == "cpu" else torch.empty(target_n.shape)
        self._read(self.places[key][0] + 4 * first, _bytes(here_n))
        if here_n is not target_n:
            target_n.copy_(here_n)

    def _read(self, start: int, into: _Buffer) -> _Buffer:
        left = memoryview(into)
        while left:
            if not (count := os.preadv(self._handle, [left], start)):
                raise ValueError("it is cut off")
            left, start = left[count:], start + count
        return into


def _parse(key: str) -> tuple[str, int, str]:
    kind, start, parameter = key.split(":", 2)
    if kind not in KINDS:
        raise ValueError(f"unknown tensor {key!r}")
    return kind, int(start), parameter


def _fill(fragment: Fragment, kind: str, start: int, file: _StateFile, key: str) -> int:
    """Fill what a stored range [start, start + its length) shares with a fragment; return how many elements."""
    length = file.places[key][1]
    first, last = max(start, fragment.start), min(start + length, fragment.stop)
    if first >= last:
        return 0
    target_n = fragment.tensors[kind][first - fragment.start : last - fragment.start]
    assert target_n.dtype == torch.float32
    file.fill(key, first - start, target_n)
    return last - first


def _files(fragments: Iterable[Fragment]) -> Iterator[dict[str, Tensor]]:
    """Yield what each file takes, copied to host memory where it is not there."""
    tensors: dict[str, Tensor] = {}
    room = FILE_BYTES
    for whole in fragments:
        width = sum(x.element_size() for x in whole.tensors.values())
        start = whole.start
        while start < whole.stop:
            stop = min(whole.stop, start + max(1, room // width))
            for kind, x_n in whole.cut(start, stop).tensors.items():
                tensors[f"{kind}:{start}:{whole.parameter}"] = x_n.detach().cpu()
            room -= (stop - start) * width
            start = stop
            if room < width:
                yield tensors
                tensors, room = {}, FILE_BYTES
    if tensors:
        yield tensors
