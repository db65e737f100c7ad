"""Sources in, records out: {text, domain} one at a time; what cannot be read is named, counted and passed over."""

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorline.errors import UserError
from anchorline.files import expanded
from torchtrain.config import Source
from torchtrain.data import demo

_MOST_KEYS = 8  # of a bad record that are named


@dataclass(frozen=True)
class Record:
    """One document's text and the domain it counts for."""

    text: str
    domain: str


@dataclass(frozen=True)
class BadRecord:
    """A record that gives no document: where it stands, why, and the domain it counts for (the source's, if unknown).

    As a string it is one line that any terminal and file takes: a record's keys and a file's name may hold anything.
    """

    where: str
    reason: str
    domain: str

    def __str__(self) -> str:
        line = f"{self.where}: {self.reason}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


class _BadItemError(Exception):
    """Why a record gives no document."""


def read(source: Source) -> Iterator[Record | BadRecord]:
    """Yield the records of a source in an order that never changes; bad ones in their place, so that nothing is silent.

    A record is bad where its JSON does not parse, or its text or domain is missing, no string, blank or not Unicode.
    `source.max_documents` counts good records.

    Raises:
        UserError: no file matches, a file has another suffix, lacks the text column or cannot be read on, the data set
            cannot be loaded, or a package is missing.
    """
    records = _read_all(source)
    if source.max_documents is None:
        yield from records
        return
    good = 0
    for record in records:
        yield record
        good += isinstance(record, Record)
        if good == source.max_documents:
            return


def source_name(source: Source) -> str:
    """Return the name that stands for a source: its `domain`, its demo's or data set's own name, or its files' name.

    The files `books-*.jsonl` are called `books`; where the last part of the glob is all wildcard, the folder's name.
    """
    if source.domain is not None:
        return source.domain
    if source.files is None:
        return source.demo or source.dataset or ""
    for part in reversed(Path(source.files).parts):
        stem = re.sub(r"\.(jsonl(\.gz)?|parquet)$", "", part)
        if name := re.sub(r"\[.*?\]|[*?]", "", stem).strip("-_. /\\"):
            return name
    return "files"


def source_files(source: Source) -> list[Path]:
    """Return the files of a `files` source, sorted.

    Raises:
        UserError: nothing matches, or a match is neither .jsonl, .jsonl.gz nor .parquet.
    """
    assert source.files is not None
    pattern = str(expanded(source.files))
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    if not paths:
        raise UserError(f"data.sources: files {source.files!r} matches no file; check the path (from {Path.cwd()})")
    for path in paths:
        if not path.is_file() or not path.name.endswith((".jsonl", ".jsonl.gz", ".parquet")):
            raise UserError(
                f"data.sources: {path} is no .jsonl, .jsonl.gz or .parquet file; narrow files {source.files!r}"
            )
    return paths


def _read_all(source: Source) -> Iterator[Record | BadRecord]:
    name = source_name(source)
    if source.demo is not None:
        for where, text in demo.documents(source.demo):
            yield _record(source, name, where, {"text": text}, text_field="text")
        return
    if source.dataset is not None:
        items = _hub_items(source)
    else:
        items = (item for path in source_files(source) for item in _file_items(path, source))
    for where, item in items:
        if isinstance(item, _BadItemError):
            yield BadRecord(where, str(item), name)
        else:
            yield _record(source, name, where, item, source.text_field)


def _record(source: Source, name: str, where: str, item: Any, text_field: str) -> Record | BadRecord:
    domain = name
    try:
        if source.domain_field is not None:
            domain = _string(item, source.domain_field, "domain_field")
        return Record(_string(item, text_field, "text_field"), domain)
    except _BadItemError as why:
        return BadRecord(where, str(why), domain)


def _string(item: Any, field: str, setting: str) -> str:
    if not isinstance(item, dict):
        raise _BadItemError(f"is no JSON object but {type(item).__name__}")
    value = _look_up(item, field)
    if value is None:
        keys = [f"{key:.40}" for key in item][:_MOST_KEYS] + ["..."] * (len(item) > _MOST_KEYS)
        raise _BadItemError(f"has no {field!r} (it has {', '.join(keys) or 'nothing'}; see {setting})")
    if not isinstance(value, str):
        raise _BadItemError(f"{field!r} is no string but {type(value).__name__}")
    if not value.strip():
        raise _BadItemError(f"{field!r} is blank")
    try:
        # JSON can spell half of a surrogate pair, which no tokenizer can encode.
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _BadItemError(f"{field!r} is not valid Unicode (half a surrogate pair)") from None
    return value


def _look_up(item: dict[str, Any], field: str) -> Any:
    """Return item[field], or a.b.c as item[a][b][c]; None where it is missing."""
    if field in item:
        return item[field]
    value: Any = item
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _file_items(path: Path, source: Source) -> Iterator[tuple[str, Any]]:
    return _parquet_items(path, source) if path.suffix == ".parquet" else _jsonl_items(path)


def _jsonl_items(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        # Bytes, not text: a line that is no UTF-8 must cost that line and not the file.
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    yield where, json.loads(line.decode("utf-8-sig"))
                except UnicodeDecodeError:
                    yield where, _BadItemError("is not UTF-8")
                except (ValueError, RecursionError) as error:
                    yield where, _BadItemError(f"is no JSON: {error}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"data.sources: {path} breaks off after line {number}: {error}; copy it again") from None
    except OSError as error:
        raise UserError(f"data.sources: {path}: {error.strerror}") from None


def _parquet_items(path: Path, source: Source) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise _missing_datasets(f"files {source.files!r}") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            wanted = {
                name
                for field in (source.text_field, source.domain_field or "")
                for name in (field, field.split(".")[0])
            }
            columns = [name for name in file.schema_arrow.names if name in wanted]
            for field, setting in ((source.text_field, "text_field"), (source.domain_field, "domain_field")):
                if field is not None and not {field, field.split(".")[0]} & set(columns):
                    known = ", ".join(file.schema_arrow.names)
                    raise UserError(f"data.sources: {path} has no column {field!r}; it has {known}: set {setting}")
            for batch in file.iter_batches(columns=columns):
                for item in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", item
    except (arrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"data.sources: {path} cannot be read after row {number}: {reason}") from None


def _hub_items(source: Source) -> Iterator[tuple[str, Any]]:
    try:
        from datasets import load_dataset
        from datasets.exceptions import DatasetsError
    except ImportError:
        raise _missing_datasets(f"dataset {source.dataset!r}") from None
    assert source.dataset is not None
    number = 0
    try:
        rows = load_dataset(
            source.dataset, source.subset, split=source.split, streaming=source.streaming, revision=source.revision
        )
        for number, item in enumerate(rows, start=1):
            yield f"{source.dataset} [{source.split}] record {number}", item
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"data.sources: dataset {source.dataset!r} (subset {source.subset!r}, split {source.split!r}) "
            f"cannot be read after record {number}: {reason}"
        ) from None


def _missing_datasets(what: str) -> UserError:
    return UserError(f"data.sources: {what} needs the package datasets: pip install 'anchorline[torch]'")
