"""Sources in, records out: {text, domain} one at a time; what cannot be read is named, counted and passed over."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anchorline import corpora
from torchtrain.config import Source
from torchtrain.data.files import KINDS, BadItemError, FileInfo, items, list_files, text_item
from torchtrain.data.hub import count_shards, dataset_items
from torchtrain.data.packing import SAMPLE, SAMPLE_FILES, random_stream

_MOST_KEYS = 8  # of a bad record that are named
_DRAWS = 1024  # at one time


@dataclass(frozen=True)
class Document:
    """One document's text and the domain it counts for."""

    text: str
    domain: str
    where: str = field(default="", compare=False)  # it stands


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


@dataclass(frozen=True)
class SourcePart:
    """A part of a source that can be read alone: a file, or a shard of a data set.

    `number` is its place among all of the source's, of which a sample may leave some out.
    """

    number: int
    place: str = ""
    bytes: int | None = None  # None: not known before it is read


def read(source: Source, part: SourcePart | None = None) -> Iterator[Document | BadRecord]:
    """Yield the records of a source in an order that never changes; bad ones in their place, so that nothing is silent.

    A record is bad where it cannot be parsed, or its text or domain is missing, no string, blank or not Unicode.
    `source.max_documents` counts good records.

    Args:
        source: which.
        part: read only this one of `list_parts`. All of them, one after another, are the whole.

    Raises:
        UserError: no file matches, a file has another suffix, lacks the text column or cannot be read on, the data set
            cannot be loaded, or a package is missing.
    """
    if part is not None:
        yield from _read_part(source, part)
        return
    if source.demo is not None or (source.dataset is not None and not is_sampled(source)):
        records = _read_part(source, None)
    else:
        records = (record for one in list_parts(source) for record in _read_part(source, one))
    if source.max_documents is None:
        yield from records
        return
    good = 0
    for record in records:
        yield record
        good += isinstance(record, Document)
        if good == source.max_documents:
            return


def list_parts(source: Source) -> list[SourcePart]:
    """Return the parts of a source, which can be read apart, in order; of a sample, the files or shards drawn.

    Raises:
        UserError: as `read`.
    """
    if source.demo is not None:
        parts = [SourcePart(0)]
    elif source.dataset is not None:
        parts = [SourcePart(number) for number in range(count_shards(source))]
    else:
        parts = [SourcePart(number, file.place, file.bytes) for number, file in enumerate(source_files(source))]
    if source.sample_files is None:
        return parts
    count = max(1, round(source.sample_files * len(parts)))
    drawn = random_stream(source.sample_seed, SAMPLE_FILES).permutation(len(parts))[:count]
    return [parts[number] for number in sorted(drawn.tolist())]


def source_files(source: Source) -> list[FileInfo]:
    """Return the files of a `files` or `texts` source in the order in which they are read.

    Raises:
        UserError: none matches, or one is not such a file.
    """
    if source.texts is not None:
        return list_files(source.texts, ("",))
    return list_files(source.files or "", KINDS)


def is_sampled(source: Source) -> bool:
    """Whether a share of the source is read."""
    return source.sample is not None or source.sample_files is not None


def source_name(source: Source) -> str:
    """Return the name that stands for a source: its `domain`, its demo's or data set's own name, or its files' name.

    The files `books-*.jsonl` are called `books`; where the last part of the glob is all wildcard, the folder's name.
    """
    if source.domain is not None:
        return source.domain
    pattern = source.files or source.texts
    if pattern is None:
        return source.demo or source.dataset or ""
    for part in reversed(Path(pattern).parts):
        stem = re.sub(r"\.(jsonl(\.gz|\.zst)?|parquet|txt)$", "", part)
        if name := re.sub(r"\[.*?\]|[*?]", "", stem).strip("-_. /\\"):
            return name
    return "files"


def _read_part(source: Source, part: SourcePart | None) -> Iterator[Document | BadRecord]:
    """Yield the records of a part; None: of the whole of a data set."""
    name = source_name(source)
    text_field = source.text_field
    if source.demo is not None:
        said = f"data.sources: demo {source.demo!r}"
        found = ((where, {"text": text}) for where, text in corpora.documents(source.demo, said))
        text_field = "text"
    elif source.dataset is not None:
        found = dataset_items(source, part.number if part else None)
    elif source.texts is not None:
        assert part is not None
        found = (text_item(place) for place in (part.place,))
    else:
        assert part is not None
        found = items(part.place, _fields(source))
    if source.sample is not None:
        found = _sample(found, source.sample, random_stream(source.sample_seed, SAMPLE, part.number if part else 0))
    for where, item in found:
        if isinstance(item, BadItemError):
            yield BadRecord(where, str(item), (source.rename or {}).get(name, name))
        else:
            yield _record(source, name, where, item, text_field)


def _sample(found: Iterator[tuple[str, Any]], share: float, random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Yield each item with the same odds: which are drawn depends on their numbers in the part alone."""
    draws: list[float] = []
    for item in found:
        if not draws:
            draws = random.random(_DRAWS).tolist()
        if draws.pop() < share:
            yield item


def _fields(source: Source) -> dict[str, str]:
    named = {"text_field": source.text_field, "domain_field": source.domain_field}
    return {setting: field for setting, field in named.items() if field is not None}


def _record(source: Source, name: str, where: str, item: Any, text_field: str) -> Document | BadRecord:
    rename = source.rename or {}
    domain = rename.get(name, name)
    try:
        if source.domain_field is not None:
            domain = _name(item, source.domain_field)
            domain = rename.get(domain, domain)
        return Document(_string(item, text_field, "text_field"), domain, where)
    except BadItemError as why:
        return BadRecord(where, str(why), domain)


def _name(item: Any, field: str) -> str:
    """Return a domain as a record names it: it will stand in files, tables and on screens."""
    domain = _string(item, field, "domain_field")
    if any(unicodedata.category(character) == "Cc" for character in domain):
        raise BadItemError(f"{field!r} holds control characters")
    return domain


def _string(item: Any, field: str, setting: str) -> str:
    if not isinstance(item, dict):
        raise BadItemError(f"is not a JSON object but {type(item).__name__}")
    value = _look_up(item, field)
    if value is None:
        keys = [f"{key:.40}" for key in item][:_MOST_KEYS] + ["..."] * (len(item) > _MOST_KEYS)
        raise BadItemError(f"has no {field!r} (it has {', '.join(keys) or 'nothing'}; see {setting})")
    if not isinstance(value, str):
        raise BadItemError(f"{field!r} is not a string but {type(value).__name__}")
    if not value.strip():
        raise BadItemError(f"{field!r} is blank")
    try:
        # JSON can spell half of a surrogate pair, which no tokenizer can encode.
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise BadItemError(f"{field!r} is not valid Unicode (half a surrogate pair)") from None
    return value


def _look_up(item: dict[str, Any], field: str) -> Any:
    """Return item[field], or a.b.c as item[a][b][c]; None where it is missing."""
    if field in item:
        return item[field]
    value: Any = item
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
