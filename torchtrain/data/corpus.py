"""Sources in, records out: {text, domain} one at a time; what cannot be read is named, counted and passed over."""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorline import corpora
from torchtrain.config import Source
from torchtrain.data.files import BadItemError, find_files, items
from torchtrain.data.hub import dataset_items

_MOST_KEYS = 8  # of a bad record that are named


@dataclass(frozen=True)
class Document:
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


def read(source: Source) -> Iterator[Document | BadRecord]:
    """Yield the records of a source in an order that never changes; bad ones in their place, so that nothing is silent.

    A record is bad where it cannot be parsed, or its text or domain is missing, no string, blank or not Unicode.
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
        good += isinstance(record, Document)
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
        stem = re.sub(r"\.(jsonl(\.gz|\.zst)?|parquet)$", "", part)
        if name := re.sub(r"\[.*?\]|[*?]", "", stem).strip("-_. /\\"):
            return name
    return "files"


def _read_all(source: Source) -> Iterator[Document | BadRecord]:
    name = source_name(source)
    if source.demo is not None:
        for where, text in corpora.documents(source.demo, f"data.sources: demo {source.demo!r}"):
            yield _record(source, name, where, {"text": text}, text_field="text")
        return
    if source.dataset is not None:
        found = dataset_items(source)
    else:
        assert source.files is not None
        found = (item for path in find_files(source.files) for item in items(path, _fields(source)))
    for where, item in found:
        if isinstance(item, BadItemError):
            yield BadRecord(where, str(item), name)
        else:
            yield _record(source, name, where, item, source.text_field)


def _fields(source: Source) -> dict[str, str]:
    named = {"text_field": source.text_field, "domain_field": source.domain_field}
    return {setting: field for setting, field in named.items() if field is not None}


def _record(source: Source, name: str, where: str, item: Any, text_field: str) -> Document | BadRecord:
    domain = name
    try:
        if source.domain_field is not None:
            domain = _name(item, source.domain_field)
        return Document(_string(item, text_field, "text_field"), domain)
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
