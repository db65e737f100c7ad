"""Reads items from files of this disk or of a URL, and from Hugging Face data sets; one item at a time is in memory.

.jsonl files, plain or compressed (.gz, .zst), are read line by line, .parquet files and data sets a few rows at a time.
fsspec reads URLs: s3://, gs://, hf://, https://, zip://...::... and so on. An item that cannot be read is yielded as a
`BadItemError` with the reason. On this disk a name that exists as it is written is no pattern. A wildcard matches no
name that begins with a dot, and nothing in a folder that this user may not list.
"""

import fnmatch
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tarfile import TarError
from typing import Any, BinaryIO, cast
from zipfile import BadZipFile

import fsspec

from anchorline.errors import UserError, disk_fault, one_line, quoted, quoted_reason
from anchorline.files import check_no_pattern, expand
from torchtrain.config import Source

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
MOST_LINE_BYTES = 1 << 28
_ROWS_AT_A_TIME = 256
_HUB_SECONDS = 10.0  # in which the hub has to answer
_MOST_REASON = 1000  # characters
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(://|::)")
# What file systems, decompressors and datasets raise of something that cannot be listed or read.
_FAULTS = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RuntimeError,
    ImportError,
    EOFError,
    BadZipFile,
    TarError,
    zlib.error,
)
# The keys of file systems whose value differs from one version of a file to the next.
_VERSIONS = ("ETag", "etag", "blob_id", "sha256", "md5", "mtime", "LastModified", "last_modified", "updated", "created")


class BadItemError(Exception):
    """Why an item gives no document."""


@dataclass(frozen=True)
class FileInfo:
    """A file of a source: its path or URL, its size in bytes, and what differs from one version to the next."""

    place: str
    bytes: int
    version: str | int

    @property
    def name(self) -> str:
        """The last part of its path."""
        return _own_path(self.place).rpartition("/")[2]


def is_url(pattern: str) -> bool:
    """Whether a path is a URL: it begins with the name of a protocol, and is not there on this disk."""
    return bool(_PROTOCOL.match(pattern)) and not os.path.lexists(pattern)


def list_files(pattern: str, kinds: tuple[str, ...] = KINDS) -> list[FileInfo]:
    """Return the files that match a glob pattern or a URL with wildcards, sorted. `**` follows links, but no loop.

    kinds: how their names may end; ("",) takes any.
    Raises UserError: nothing matches, a match is not such a file, or the place cannot be listed.
    """
    shown = f"data.sources: files {quoted(pattern)}"
    try:
        files = _list_url(pattern) if is_url(pattern) else list_disk(pattern, kinds)
    except UserError:
        raise
    except FileNotFoundError:
        files = []
    except _FAULTS as error:
        raise UserError(f"{shown} cannot be listed: {quoted_reason(error)}") from None
    if not files:
        raise UserError(f"{shown} matches no file; check the path (from {Path.cwd()}) or the URL")
    for file in files:
        if not _ends(file.place, kinds):
            raise _not_a_file(file.place, pattern, kinds)
    return files


def list_disk(pattern: str, kinds: tuple[str, ...]) -> list[FileInfo]:
    """As `list_files`, of this disk; empty where nothing matches."""
    folder = expand(pattern)
    if kinds[0] and folder.is_dir():
        each = quoted(str(folder / f"*{kinds[0]}"))
        raise UserError(f"data.sources: files {quoted(pattern)} is a folder; give its files, such as {each}")
    files = set()
    root = os.sep if folder.is_absolute() else ""
    for path in map(Path, _matches(root, [part for part in folder.parts if part != os.sep], ())):
        if not kinds[0] and path.is_dir():
            continue
        # Checked at once: the rest may be a whole disk.
        if not path.name.endswith(kinds) or not path.is_file():
            raise _not_a_file(str(path), pattern, kinds)
        files.add(path)
    return [FileInfo(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in sorted(files)]


def _matches(folder: str, parts: Sequence[str], above: tuple[str, ...]) -> Iterator[str]:
    """As `glob.glob(recursive=True)`, but a name that is there is no pattern, and no link leads into a loop."""
    if not parts:
        yield folder
        return
    part, *rest = parts
    literal = os.path.join(folder, part)
    if os.path.lexists(literal) and part != "**":
        yield from _matches(literal, rest, above)
        return
    if not glob.has_magic(part):
        return
    try:
        names = sorted(os.listdir(folder or os.curdir))
    except OSError:  # no folder, or not ours to read
        return
    if part == "**":
        above = above or (os.path.realpath(folder),)
        yield from _matches(folder, rest or ["*"], above)
    for name in names:
        inner = os.path.join(folder, name)
        if part != "**":
            if fnmatch.fnmatch(name, part) and (not name.startswith(".") or part.startswith(".")):
                yield from _matches(inner, rest, above)
        elif not name.startswith(".") and os.path.isdir(inner) and (place := os.path.realpath(inner)) not in above:
            yield from _matches(inner, parts, (*above, place))


def _list_url(pattern: str) -> list[FileInfo]:
    first, *rest = pattern.split("::")
    system, path = fsspec.core.url_to_fs(pattern)
    there = glob.has_magic(path) and system.isfile(path)
    matches: Any = {path: system.info(path)} if there else system.glob(path, detail=True)
    files = []
    for name in sorted(matches):
        info = matches[name] if matches[name].get("size") is not None else system.info(name)
        if info.get("type") == "directory":
            continue
        url = system.unstrip_protocol(name)
        if rest:  # `unstrip_protocol` does not know of the place behind `::`
            url = "::".join([f"{first.partition('://')[0]}://{name}", *rest])
        version = next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), "")
        files.append(FileInfo(url, int(info.get("size") or 0), version))
    return files


def _not_a_file(place: str, pattern: str, kinds: tuple[str, ...]) -> UserError:
    known = f"{' or '.join((', '.join(kinds[:-1]), kinds[-1]))} " if kinds[0] else ""
    return UserError(f"data.sources: {_shown(place)} is not a regular {known}file; narrow files {quoted(pattern)}")


# --- files ------------------------------------------------------------------------------------------------------------


def items(place: str, fields: dict[str, str], everything: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield (place, item) of each record of a file in its order; the item is a `BadItemError` where it cannot be read.

    place: a path or URL that `list_files` returned.
    fields: setting -> the field that it names, such as {"text_field": "text"}.
    everything: of Parquet, read the other columns, too.
    Raises UserError: the file breaks off, or lacks a column.
    """
    return _parquet_items(place, fields, everything) if _ends(place, ".parquet") else _jsonl_items(place)


def text_item(place: str) -> tuple[str, Any]:
    """Return (place, item) of a text file: its text, path and folder. Raises UserError: it cannot be read."""
    with _name_fault(place), _open(place) as file:
        content = file.read(MOST_LINE_BYTES + 1)
    if len(content) > MOST_LINE_BYTES:
        return place, BadItemError(f"is longer than {MOST_LINE_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return place, BadItemError("is not UTF-8")
    return place, {"text": text, "path": place, "folder": place.split("/")[-2] if "/" in place else ""}


def _jsonl_items(place: str) -> Iterator[tuple[str, Any]]:
    number = 0
    with _name_fault(place, lambda: f" breaks off after line {number}"), _open_decompressed(place) as file:
        for number, line in enumerate(_lines(file), start=1):
            if line is None:
                yield f"{place}:{number}", BadItemError(f"is longer than {MOST_LINE_BYTES:,} bytes")
            elif line.strip():
                yield f"{place}:{number}", _parse(line)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return BadItemError("is not UTF-8")
    except json.JSONDecodeError as error:
        return BadItemError(f"is not JSON: {error.msg} at character {error.pos + 1}")
    except (ValueError, RecursionError) as error:
        return BadItemError(f"is not JSON: {error}")


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """Yield each line; None for one that is too long to hold."""
    while line := file.readline(MOST_LINE_BYTES + 1):
        if len(line) <= MOST_LINE_BYTES:
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(1 << 20)
        yield None


def _parquet_items(place: str, fields: dict[str, str], everything: bool) -> Iterator[tuple[str, Any]]:
    import pyarrow.parquet as parquet

    number = 0
    with (
        _name_fault(place, lambda: f" cannot be read after row {number}"),
        _open(place) as raw,
        parquet.ParquetFile(raw if is_url(place) else place) as file,
    ):
        wanted = {name for field in fields.values() for name in (field, field.split(".")[0])}
        columns = [name for name in file.schema_arrow.names if everything or name in wanted]
        for setting, field in fields.items():
            if not {field, field.split(".")[0]} & set(columns):
                known = one_line(", ".join(file.schema_arrow.names[:20]))
                raise UserError(
                    f"data.sources: {_shown(place)} has no column {quoted(field)}; it has {known}: set {setting}"
                )
        for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=columns):
            for item in _rows_of(batch):
                number += 1
                yield f"{place}: row {number}", item


def _rows_of(batch: Any) -> list[Any]:
    """Return a RecordBatch's rows as dicts. A value that Python cannot hold (not UTF-8) costs its row only."""
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error}"
            return [BadItemError(reason)]
        return [row for i in range(len(batch)) for row in _rows_of(batch.slice(i, 1))]


@contextmanager
def _open_decompressed(place: str) -> Iterator[BinaryIO]:
    """Open a file for reading what it holds decompressed. Nothing is sought, because a stream over HTTP cannot be."""
    with _open(place) as raw:
        file = io.BufferedReader(cast(io.RawIOBase, raw), 1 << 17)  # fsspec's own readline takes no limit
        if not _ends(place, (".gz", ".zst")):
            yield file
            return
        if not file.peek(1):  # what holds nothing has a header
            raise EOFError("it is empty")
        if _ends(place, ".gz"):
            with gzip.open(file, "rb") as content:
                yield cast(BinaryIO, content)
        else:
            import pyarrow

            # pyarrow reads all frames of a .zst file, and raises if it is cut off.
            with pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd") as content:
                try:
                    yield cast(BinaryIO, io.BufferedReader(content, 1 << 17))
                except OSError as error:
                    if "requires too much memory" not in str(error):
                        raise
                    raise UserError(
                        f"data.sources: {_shown(place)} was packed with a window of more than 128 MiB (zstd --long); "
                        "pack it again: zstd -d --long=31 --stdout FILE | zstd -o NEW.jsonl.zst"
                    ) from None


@contextmanager
def _open(place: str) -> Iterator[BinaryIO]:
    with fsspec.open(place, "rb") if is_url(place) else open(place, "rb") as file:
        yield cast(BinaryIO, file)


@contextmanager
def _name_fault(place: str, how_far: Callable[[], str] = lambda: "") -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except _FAULTS as error:
        reason = disk_fault(error) if isinstance(error, OSError) and error.errno else one_line(error)[:_MOST_REASON]
        raise UserError(f"data.sources: {_shown(place)}{how_far()}: {reason}; check it, or copy it again") from None


def _shown(place: str) -> str:
    return quoted(place if is_url(place) else Path(place))


def _ends(place: str, suffix: str | tuple[str, ...]) -> bool:
    return _own_path(place).endswith(suffix)


def _own_path(place: str) -> str:
    """Return the path that names a file: of a URL in a URL (zip://a.jsonl::file.zip) the first."""
    return place.partition("::")[0] if is_url(place) else place


# --- data sets --------------------------------------------------------------------------------------------------------


def count_shards(source: Source) -> int:
    """Return into how many pieces a `dataset` source can be cut: its files. Raises UserError: as `dataset_items`."""
    with _name_dataset_fault(source):
        return int(_load_dataset(source, streaming=True).num_shards)


def dataset_items(source: Source, shard: int | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (place, item) of a `dataset` source, or of one of its shards. Raises UserError: it cannot be read."""
    name = f"{source.dataset} [{source.split}]" + ("" if shard is None else f" shard {shard}")
    number = 0
    with _name_dataset_fault(source, lambda: number):
        rows = _load_dataset(source, streaming=source.streaming or shard is not None)
        if shard is not None:
            rows = rows.shard(num_shards=rows.num_shards, index=shard)
        # As Arrow tables: of a string that is not UTF-8, datasets' own rows would raise for all that follow it.
        for table in rows.with_format("arrow").iter(batch_size=_ROWS_AT_A_TIME):
            for item in (item for batch in table.to_batches() for item in _rows_of(batch)):
                number += 1
                yield f"{name} record {number}", item


def _load_dataset(source: Source, streaming: bool) -> Any:
    """Load a data set from a folder, also one that `save_to_disk` left, or from the hub."""
    import datasets

    assert source.dataset is not None
    if os.path.isdir(source.dataset):
        check_no_pattern(f"data.sources: dataset {quoted(source.dataset)}", source.dataset)
    else:
        _check_hub(source)
    folder = Path(source.dataset, source.subset or "")
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        if not folder.resolve().is_relative_to(Path(source.dataset).resolve()):
            raise ValueError("the subset is not inside the folder")
        saved: Any = datasets.load_from_disk(str(folder))
        splits = saved if isinstance(saved, datasets.DatasetDict) else {str(saved.split or source.split): saved}
        if source.split not in splits:
            raise ValueError(f"it has no split {source.split!r}, but {', '.join(sorted(map(str, splits)))}")
        return splits[source.split].to_iterable_dataset() if streaming else splits[source.split]
    load: Any = datasets.load_dataset  # whose types depend on whether it streams
    return load(source.dataset, source.subset, split=source.split, streaming=streaming, revision=source.revision)


def _check_hub(source: Source) -> None:
    """Ask the hub for a data set once, with a time limit. datasets itself would ask for minutes."""
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    # What the hub's client raises where there is no answer: its http package depends on its version.
    http: Any = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"]
    assert source.dataset is not None
    shown = f"data.sources: dataset {quoted(source.dataset)}"
    if os.path.isfile(source.dataset):
        raise UserError(f"{shown}: is a file; give it as files, or the folder that it is in")
    try:
        huggingface_hub.utils.validate_repo_id(source.dataset)
        if not huggingface_hub.constants.is_offline_mode():  # else datasets looks into its cache
            huggingface_hub.HfApi().dataset_info(source.dataset, revision=source.revision, timeout=_HUB_SECONDS)
    except (OSError, ValueError, *http) as error:
        raise UserError(
            f"{shown}: there is no such folder (from {Path.cwd()}), and the hub gives no such data set: "
            f"{quoted_reason(error)}; correct the name, log in (hf auth login), or read datasets' cache "
            "(HF_HUB_OFFLINE=1)"
        ) from None


@contextmanager
def _name_dataset_fault(source: Source, read: Callable[[], int] = lambda: 0) -> Iterator[None]:
    from datasets.exceptions import DatasetsError

    try:
        yield
    except UserError:
        raise
    except (*_FAULTS, DatasetsError) as error:
        reason = one_line(error)[:_MOST_REASON]
        if error.__cause__ is not None:  # datasets' last error often says only that something failed
            reason += f" ({one_line(error.__cause__)[:_MOST_REASON]})"
        raise UserError(
            f"data.sources: dataset {quoted(source.dataset)} (subset {quoted(source.subset)}, split "
            f"{quoted(source.split)}) cannot be read after record {read()}: {reason}"
        ) from None
