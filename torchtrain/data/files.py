"""The user's files: which of them a pattern means, and the items of each, one at a time. What gives no item says why.

.jsonl, plain or compressed (.gz, .zst), is read line by line, .parquet a few rows at a time: what is held at one time
is a record, not a file. A pattern may be a URL of fsspec's (`torchtrain.data.remote`).
"""

import fnmatch
import glob
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from anchorline.errors import UserError, disk_fault, one_line, quoted, quoted_reason
from anchorline.files import expand
from torchtrain.data import remote
from torchtrain.data.remote import FileInfo

KINDS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
MOST_LINE_BYTES = 1 << 28
_MOST_NAMES = 1_000_000
_MOST_DEPTH = 100
ROWS_AT_A_TIME = 256


class BadItemError(Exception):
    """Why an item gives no document."""


def find_files(pattern: str, kinds: tuple[str, ...] = KINDS) -> list[Path]:
    """Return the files that a glob pattern means, sorted, each once. `**` goes into any number of folders, links too.

    Args:
        pattern: of this disk, no URL.
        kinds: how their names may end; ("",) takes any.

    Raises:
        UserError: nothing matches; a match is not a file that we read; or too much would have to be looked at.
    """
    shown = f"data.sources: files {quoted(pattern)}"
    if "\0" in pattern:
        raise UserError(f"{shown}: holds NUL, which no file's name can; remove it")
    found = set()
    for name in _Matches(shown).of(str(expand(pattern))):
        path = Path(name)
        # Told of the first one: the rest may be a whole disk.
        if not kinds[0] and os.path.isdir(path):
            continue
        if not path.name.endswith(kinds) or not os.path.isfile(path):
            known = f"{' or '.join((', '.join(kinds[:-1]), kinds[-1]))} " if kinds[0] else ""
            if path == expand(pattern) and path.is_dir():
                each = quoted(str(path / f"*{kinds[0]}"))
                raise UserError(f"data.sources: files {quoted(pattern)} is a folder; give its files, such as {each}")
            raise UserError(
                f"data.sources: {quoted(path)} is not a regular {known}file; narrow files {quoted(pattern)}"
            )
        found.add(path)
    if not found:
        raise UserError(f"{shown} matches no file; check the path (from {Path.cwd()})")
    return sorted(found)


class _Matches:
    """What a pattern matches, as `glob.glob(recursive=True)` has it, but bounded: a loop of links is left, and after a
    million names there is an error.
    """

    def __init__(self, shown: str) -> None:
        self._shown, self._names = shown, 0

    def of(self, pattern: str) -> Iterator[str]:
        root = os.sep if pattern.startswith(os.sep) else ""
        yield from self._below(root, [part for part in pattern.split(os.sep) if part], ())

    def _below(self, folder: str, parts: Sequence[str], above: tuple[tuple[int, int], ...]) -> Iterator[str]:
        if not parts:
            yield folder
            return
        part, rest = parts[0], parts[1:]
        if part == "**":
            yield from self._below(folder, rest or ["*"], above)
            for name in self._list(folder):
                inner = os.path.join(folder, name)
                if not name.startswith(".") and (place := _folder(inner)) and place not in above:
                    if len(above) == _MOST_DEPTH:
                        raise UserError(f"{self._shown}: folders are nested more than {_MOST_DEPTH} deep; narrow it")
                    yield from self._below(inner, parts, (*above, place))
        elif glob.has_magic(part):
            for name in self._list(folder):
                if fnmatch.fnmatch(name, part) and (not name.startswith(".") or part.startswith(".")):
                    yield from self._below(os.path.join(folder, name), rest, above)
        elif os.path.lexists(inner := os.path.join(folder, part)):
            yield from self._below(inner, rest, above)

    def _list(self, folder: str) -> list[str]:
        try:
            names = sorted(os.listdir(folder or os.curdir))
        except OSError:  # no folder, or not ours to read
            return []
        self._names += len(names)
        if self._names > _MOST_NAMES:
            raise UserError(
                f"{self._shown}: more than {_MOST_NAMES:,} names were looked at; let it begin deeper, or narrow it"
            )
        return names


def _folder(path: str) -> tuple[int, int] | None:
    """Return what tells a folder from every other; None of anything else."""
    try:
        status = os.stat(os.path.join(path, ""))
    except OSError:
        return None
    return status.st_dev, status.st_ino


def list_files(pattern: str, kinds: tuple[str, ...] = KINDS) -> list[FileInfo]:
    """Return the files that a pattern of this disk or a URL means, in the order in which they are read.

    Raises:
        UserError: as `find_files`; or what the URL names cannot be listed.
    """
    if remote.is_url(pattern):
        found = remote.list_urls(pattern)
        for info in found:
            if not info.place.partition("::")[0].endswith(kinds):
                known = ", ".join(kinds)
                raise UserError(
                    f"data.sources: {quoted(info.place)} is not a {known} file; narrow files {quoted(pattern)}"
                )
        return found
    paths = find_files(pattern, kinds)
    return [FileInfo(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in paths]


def items(place: str, fields: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield (where it stands, item) of a file in its order; for an item that cannot be read, why, as a BadItemError.

    Args:
        place: a path or URL that `list_files` returned.
        fields: setting -> the field that it names, such as {"text_field": "text"}; of Parquet no other column is read.

    Raises:
        UserError: the file cannot be read on, or lacks a column.
    """
    return _parquet_items(place, fields) if _ends(place, ".parquet") else _jsonl_items(place)


def text_item(place: str) -> tuple[str, Any]:
    """Return (where it stands, item) of a text file: its text, path, and the folder it lies in.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with _open_raw(place) as file:
            content = file.read(MOST_LINE_BYTES + 1)
    except OSError as error:
        raise UserError(f"data.sources: {_shown(place)}: {disk_fault(error)}") from None
    except remote.faults() as error:
        raise UserError(f"data.sources: {_shown(place)}: {quoted_reason(error)}") from None
    if len(content) > MOST_LINE_BYTES:
        return place, BadItemError(f"is longer than {MOST_LINE_BYTES:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return place, BadItemError("is not UTF-8")
    return place, {"text": text, "path": place, "folder": place.split("/")[-2] if "/" in place else ""}


def _shown(place: str) -> str:
    return quoted(place if remote.is_url(place) else Path(place))


def _ends(place: str, suffix: str) -> bool:
    """Whether a file's name ends so; of a URL in a URL (zip://a.jsonl::file.zip) the first counts."""
    return place.partition("::")[0].endswith(suffix)


def _jsonl_items(path: str) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(_lines(file), start=1):
                where = f"{path}:{number}"
                if line is None:
                    yield where, BadItemError(f"is longer than {MOST_LINE_BYTES:,} bytes")
                elif line.strip():
                    yield where, _parse(line)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise _breaks_off(path, number, error) from None
    except OSError as error:
        if error.errno is None:  # pyarrow's, of what it decompresses
            raise _breaks_off(path, number, error) from None
        raise UserError(f"data.sources: {_shown(path)}: {disk_fault(error)}") from None
    except remote.faults() as error:
        if isinstance(error, UserError) or not remote.is_url(path):
            raise
        raise _breaks_off(path, number, error) from None


def _parse(line: bytes) -> Any:
    try:
        # Line by line, not a text file: a line that is not UTF-8 must cost that line and not the file.
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return BadItemError("is not UTF-8")
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


@contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading what it holds decompressed; a .zst of several frames is one content."""
    if _ends(path, ".gz"):
        with _open_raw(path) as raw, gzip.open(_begun(raw), "rb") as file:
            yield cast(BinaryIO, file)
    elif _ends(path, ".zst"):
        arrow = import_arrow(path)
        # pyarrow's reader: it comes with datasets, and tells of a file that is cut off.
        with _open_arrow(path, arrow) as raw, arrow.CompressedInputStream(raw, "zstd") as content:
            yield cast(BinaryIO, io.BufferedReader(content, 1 << 17))
    else:
        with _open_raw(path) as file:
            yield file


def _begun(raw: Any) -> io.BufferedReader:
    """Return a compressed file that has a first byte: one that holds nothing has a header.

    It is not sought, which a stream over HTTP cannot be.

    Raises:
        EOFError: there is none.
    """
    file = io.BufferedReader(raw, 1 << 17)
    if not file.peek(1):
        raise EOFError("it is empty")
    return file


@contextmanager
def _open_arrow(path: str, arrow: Any) -> Iterator[Any]:
    if remote.is_url(path):
        with remote.open_url(path) as file:
            yield arrow.PythonFile(_begun(file), "r")
    else:
        with arrow.OSFile(path) as file:
            if not file.read(1):
                raise EOFError("it is empty")
            file.seek(0)
            yield file


@contextmanager
def _open_raw(path: str) -> Iterator[BinaryIO]:
    with remote.open_url(path) if remote.is_url(path) else open(path, "rb") as file:
        yield file


def _breaks_off(path: str, number: int, error: Exception) -> UserError:
    return UserError(f"data.sources: {_shown(path)} breaks off after line {number}: {one_line(error)}; copy it again")


def _parquet_items(path: str, fields: dict[str, str]) -> Iterator[tuple[str, Any]]:
    arrow = import_arrow(path)
    import pyarrow.parquet as parquet

    number = 0
    try:
        with _open_arrow(path, arrow) as raw, parquet.ParquetFile(raw) as file:
            wanted = {name for field in fields.values() for name in (field, field.split(".")[0])}
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for setting, field in fields.items():
                if not {field, field.split(".")[0]} & set(columns):
                    known = one_line(", ".join(file.schema_arrow.names[:20]))
                    raise UserError(
                        f"data.sources: {_shown(path)} has no column {quoted(field)}; it has {known}: set {setting}"
                    )
            for batch in file.iter_batches(batch_size=ROWS_AT_A_TIME, columns=columns):
                for item in rows_of(batch):
                    number += 1
                    yield f"{path}: row {number}", item
    except (arrow.ArrowException, OSError) as error:
        reason = one_line(error)
        raise UserError(f"data.sources: {_shown(path)} cannot be read after row {number}: {reason}") from None


def rows_of(batch: Any) -> list[Any]:
    """Return the rows of a RecordBatch as dicts. A value that Python cannot hold must cost its row only: a string that
    is not UTF-8, which Arrow does not check, or a time before the year 1.
    """
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:
        if len(batch) == 1:
            reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"cannot be read: {error}"
            return [BadItemError(reason)]
        return [row for i in range(len(batch)) for row in rows_of(batch.slice(i, 1))]


def import_arrow(what: object) -> Any:
    """Return the package pyarrow.

    Raises:
        UserError: it is not installed.
    """
    try:
        import pyarrow
    except ImportError:
        raise missing_datasets(quoted(what)) from None
    return pyarrow


def missing_datasets(what: str) -> UserError:
    """Return what to say where the package datasets, or pyarrow, which comes with it, is not installed."""
    return UserError(f"data.sources: {what} needs the package datasets: pip install 'anchorline[torch]'")
