"""The state of a run, cut into fragments that any layout of processes can write and read.

A fragment is a range of one flattened parameter: its float32 master weights and AdamW's two moments. Ranks write those
that they hold; a reader takes from all files what overlaps with its own. So the number of ranks may change.

On disk: `state-RRRRR-NNN.safetensors`, with rank and number; a tensor's name is `KIND:START:PARAMETER`. The bytes are
those of `safetensors.torch.save`, which keeps Python's lock while it copies, so that training waits.

Legend: n elements of a fragment.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from anchorline.files import FileEntry, write_file
from torchtrain.checkpoint.manifest import DamageError

KINDS = ("master", "exp_avg", "exp_avg_sq")
# Bytes of a file, and so of its copy in host memory while a GPU's state is written.
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
    """Return one of `parts` equal shares: what one rank writes of a state that every rank holds."""
    total = sum(fragment.stop - fragment.start for fragment in fragments)
    first, last = (total * i // parts for i in (part, part + 1))
    shares, before = [], 0
    for fragment in fragments:
        size = fragment.stop - fragment.start
        start, stop = max(first - before, 0), min(last - before, size)
        if start < stop:
            shares.append(fragment.cut(fragment.start + start, fragment.start + stop))
        before += size
    return shares


def write(folder: Path, fragments: Iterable[Fragment], rank: int) -> dict[str, FileEntry]:
    """Write fragments into files of about `FILE_BYTES`; return what each file is, by name. Raises OSError."""
    entries: dict[str, FileEntry] = {}
    for number, tensors in enumerate(_files(fragments)):
        name = f"state-{rank:05d}-{number:03d}.safetensors"
        entries[name] = write_file(
            folder / name, _header(tensors), *(tensors[key].numpy().data.cast("B") for key in sorted(tensors))
        )
    return entries


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the beginning of a safetensors file of float32 tensors [n], which follow in the order of their names."""
    place, entries = 0, {}
    for key in sorted(tensors):
        assert tensors[key].dtype == torch.float32, f"{key} is {tensors[key].dtype}"
        end = place + tensors[key].nbytes
        entries[key] = {"dtype": "F32", "shape": list(tensors[key].shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_whole(parameters: Mapping[str, Sequence[int]], written: Iterable[Mapping[str, int]]) -> None:
    """Check that the elements that all ranks wrote, by parameter, add up to the parameters."""
    total = dict.fromkeys(parameters, 0)
    for counts in written:
        for name, count in counts.items():
            total[name] += count
    assert total == {name: prod(shape) for name, shape in parameters.items()}


def elements(fragments: Iterable[Fragment]) -> dict[str, int]:
    """Return the number of elements of each parameter that fragments hold."""
    counts: dict[str, int] = {}
    for fragment in fragments:
        counts[fragment.parameter] = counts.get(fragment.parameter, 0) + fragment.stop - fragment.start
    return counts


def nearest(names: Iterable[str], writers: int, reader: int, readers: int) -> list[str]:
    """Return state files, first those that rank `reader` of `readers` needs: those of the writers at its share."""

    def distance(name: str) -> float:
        return abs((2 * rank_of(name) + 1) * readers - (2 * reader + 1) * writers)

    return sorted(names, key=lambda name: (distance(name), name))


def rank_of(name: str) -> int:
    """Return the rank that wrote a file of a checkpoint."""
    return int(name.split("-")[1].partition(".")[0])


@torch.no_grad()
def read(paths: Iterable[Path], fragments: Sequence[Fragment]) -> None:
    """Fill fragments from files of any layout. Raises DamageError: one is no state file, or elements are missing."""
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
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 - it is not a dict
                    kind, start, parameter = _parse(key)
                    for fragment in wanted.get(parameter, []):
                        missing[kind][parameter] -= _fill(fragment, kind, start, file.get_slice(key))
        except (SafetensorError, ValueError) as error:
            raise DamageError(f"{path}: is not a state file of a checkpoint ({error})") from None
    for kind, counts in missing.items():
        for parameter, count in counts.items():
            if count:
                raise DamageError(f"{folder}: {count} elements of {kind} of {parameter} are in none of its files")


def _parse(key: str) -> tuple[str, int, str]:
    kind, start, parameter = key.split(":", 2)
    if kind not in KINDS:
        raise ValueError(f"unknown tensor {key!r}")
    return kind, int(start), parameter


def _fill(fragment: Fragment, kind: str, start: int, stored: Any) -> int:
    """Fill what a stored range that begins at `start` shares with a fragment; return how many elements."""
    if stored.get_dtype() != "F32" or len(stored.get_shape()) != 1:
        raise ValueError(f"a tensor is {stored.get_dtype()} of shape {stored.get_shape()} and not a range of float32")
    first, last = max(start, fragment.start), min(start + stored.get_shape()[0], fragment.stop)
    if first >= last:
        return 0
    target_n = fragment.tensors[kind][first - fragment.start : last - fragment.start]
    target_n.copy_(stored[first - start : last - start])
    return last - first


def _files(fragments: Iterable[Fragment]) -> Iterator[dict[str, Tensor]]:
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
