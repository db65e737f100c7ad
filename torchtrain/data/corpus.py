"""Sources in, records out, one at a time: documents with their domain, bad records with the reason, filtered records.

A source has parts: its files, or the shards of a data set. A task of `torchtrain prepare` reads some of them. How
a source is split depends on the config and on what the source holds, so tokens and their order are always the same.
"""

import hashlib
import importlib
import json
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from anchorline import corpora
from anchorline.errors import UserError, one_line, quoted, quoted_reason
from torchtrain.config import Source
from torchtrain.data.files import (
    KINDS,
    BadItemError,
    FileInfo,
    count_shards,
    dataset_items,
    items,
    list_files,
    text_item,
)
from torchtrain.data.streams import SAMPLE, SAMPLE_FILES, random_stream

# Bytes of source files that a task reads, at least one file. Each task leaves a shard.
TASK_BYTES = 2**28
_SHARDS_OF_A_DATASET = 16  # that a task reads: their sizes are not known before
_MOST_KEYS = 8  # of a bad record that are named
_DRAWS = 1024  # at one time
_BLOCKS = ("datatrove.pipeline.filters", "datatrove.pipeline.formatters")


@dataclass(frozen=True)
class Document:
    """One document's text (or, with answers of its own, `fields`), its domain, and its place in the source."""

    text: str
    domain: str
    where: str = field(default="", compare=False)
    fields: dict[str, Any] | None = None


@dataclass(frozen=True)
class BadRecord:
    """A record that gives no document: place, reason, and the domain it counts for; as a string, one printable line."""

    where: str
    reason: str
    domain: str

    def __str__(self) -> str:
        line = f"{self.where}: {self.reason}"
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


@dataclass(frozen=True)
class FilteredRecord:
    """A record that a filter of its source left out."""


Record = Document | BadRecord | FilteredRecord


@dataclass(frozen=True)
class SourcePart:
    """A part of a source that can be read alone: a file, or a shard of a data set.

    `number` counts all of the source's parts, of which a sample may leave some out.
    """

    number: int
    place: str = ""
    bytes: int | None = None  # None: not known before it is read


@dataclass(frozen=True)
class Task:
    """Consecutive parts of a source that one process reads into one shard; no parts: the whole source."""

    source: int  # in `data.sources`
    parts: tuple[SourcePart, ...] = ()


def list_tasks(sources: Sequence[Source]) -> list[Task]:
    """Return what each task reads: up to `TASK_BYTES`, or a source with `max_documents` whole. Raises UserError."""
    tasks: list[Task] = []
    for number, source in enumerate(sources):
        if source.demo is not None or source.max_documents is not None:
            tasks.append(Task(number))
            continue
        groups: list[list[SourcePart]] = []
        room = 0
        for part in list_parts(source):
            size = TASK_BYTES // _SHARDS_OF_A_DATASET if part.bytes is None else part.bytes
            if not groups or size > room:
                groups.append([])
                room = TASK_BYTES
            groups[-1].append(part)
            room -= size
        tasks += [Task(number, tuple(parts)) for parts in groups]
    return tasks


def digest_tasks(tasks: Sequence[Task]) -> str:
    """Return a digest of which task reads what, whichever folder the files are in."""
    content = [(task.source, [(part.number, part.bytes) for part in task.parts]) for task in tasks]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def read(source: Source, part: SourcePart | None = None) -> Iterator[Record]:
    """Yield the records of a source in an order that never changes.

    A record is bad if it cannot be parsed, or if its text or domain is missing, no string, blank or not Unicode.
    `source.max_documents` counts documents.

    part: read only this one of `list_parts`. All of them, one after another, are the whole.
    Raises UserError: no file matches, a file has another suffix, lacks the text column or breaks off, the data set
        cannot be loaded, a filter is unknown or fails, or a package is missing.
    """
    if part is not None:
        yield from _read_part(source, part)
        return
    # Draws and filters begin anew in each part, so that it does not matter who reads which part.
    sampled = source.sample is not None or source.sample_files is not None or source.filters
    if source.demo is not None or (source.dataset is not None and not sampled):
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
    """Return a source's parts in reading order; of a sample of files those drawn. Raises UserError: as `read`."""
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
    """Return a source's `files` or `texts` in reading order. Raises UserError: none matches, or one is no such file."""
    return list_files(source.texts, ("",)) if source.texts is not None else list_files(source.files or "", KINDS)


def source_name(source: Source) -> str:
    """Return a source's name: its `domain`, its demo's or data set's own, or its files' (`books-*.jsonl` are `books`),
    or their folder's where the last part of the glob is all wildcard.
    """
    if source.domain is not None:
        return source.domain
    pattern = source.files or source.texts
    if pattern is None:
        return source.demo or one_line(source.dataset or "")
    for part in reversed(Path(pattern).parts):
        stem = re.sub(r"\.(jsonl(\.gz|\.zst)?|parquet|txt)$", "", part)
        name = stem if os.path.lexists(pattern) else re.sub(r"\[([*?[])\]|\[.*?\]|[*?]", r"\1", stem)  # `[?]` is a `?`
        if name := one_line(name.strip("-_. /\\")):
            return name
    return "files"


def _read_part(source: Source, part: SourcePart | None) -> Iterator[Record]:
    """Yield the records of a part; None: of the whole demo or data set."""
    number = part.number if part else 0
    text_field = source.text_field if source.records == "text" else None
    if source.demo is not None:
        texts = corpora.documents(source.demo, f"data.sources: demo {source.demo!r}")
        records, text_field = ((where, {"text": text}) for where, text in texts), "text"
    elif source.dataset is not None:
        records = dataset_items(source, part.number if part else None)
    else:
        assert part is not None
        named = {"text_field": text_field, "domain_field": source.domain_field}
        fields = {setting: name for setting, name in named.items() if name is not None}
        if source.texts is None:
            records = items(part.place, fields, everything=bool(source.filters) or text_field is None)
        else:
            records = (text_item(one) for one in (part.place,))
    if source.sample is not None:
        records = _sample(records, source.sample, random_stream(source.sample_seed, SAMPLE, number))
    rename, name = source.rename or {}, source_name(source)
    filters = make_filters(source)
    for where, item in records:
        record = _record(where, item, text_field, source.domain_field, rename.get(name, name), rename)
        yield _filter(record, item, filters) if filters and isinstance(record, Document) else record


def _sample(records: Iterator[tuple[str, Any]], share: float, random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Yield each item with the same odds: which are drawn depends on their numbers in the part alone."""
    draws: list[float] = []
    for item in records:
        if not draws:
            draws = random.random(_DRAWS).tolist()
        if draws.pop() < share:
            yield item


def make_filters(source: Source) -> list[Any]:
    """Return new blocks of `source.filters`. Raises UserError: no such block or package, or wrong options."""
    blocks = []
    for setting in source.filters:
        opening = f"data.sources: filter {quoted(setting.name)}"
        module, _, name = setting.name.rpartition(".")
        try:
            if not module:
                places = [sys.modules[__name__], *map(importlib.import_module, _BLOCKS)]
                kind = next(vars(place)[name] for place in places if name in vars(place))
            else:
                kind = getattr(importlib.import_module(module), name)
            blocks.append(kind(**setting.options))
        except StopIteration:
            raise UserError(f"{opening}: is none of {' or '.join(_BLOCKS)}; give package.module.Class") from None
        except (ImportError, AttributeError, TypeError, ValueError, AssertionError) as error:
            raise UserError(f"{opening}: cannot be made: {quoted_reason(error)}; correct its name or options") from None
    return blocks


def _filter(record: Document, item: dict[str, Any], blocks: Sequence[Any]) -> Document | FilteredRecord:
    """Pass a document through blocks, one after another, as datatrove does; its other fields are its metadata."""
    from datatrove.data import Document as PipelineDocument

    fields = {name: value for name, value in item.items() if value is not record.text}
    passed = [PipelineDocument(text=record.text, id=record.where, metadata=fields)]
    for block in blocks:
        try:
            passed = list(block.run(iter(passed)))
        except Exception as error:  # whatever a block may raise of a document that it was not made for
            raise UserError(
                f"data.sources: filter {type(block).__name__} fails at {quoted(record.where)}: "
                f"{type(error).__name__}: {quoted_reason(error)}; correct or remove it"
            ) from None
    if not passed or not passed[0].text.strip():
        return FilteredRecord()
    return Document(passed[0].text, record.domain, record.where)


class SampleShort:
    """A filter that keeps every long document and a share of the short ones, as the code of arXiv 2402.10171 does.

    characters: from which on a document is long.
    share: of the short documents, drawn by their text. So copies are kept or left out together.
    seed: draws another share.
    """

    def __init__(self, characters: int, share: float, seed: int = 0) -> None:
        if not 0 <= share <= 1:
            raise ValueError(f"share {share} is not within 0 and 1")
        self._characters, self._share, self._key = characters, share, f"{seed}:".encode()

    def run(self, data: Iterable[Any], rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        """Yield the documents that are kept."""
        for document in data:
            if len(document.text) >= self._characters or self._draw(document.text) < self._share:
                yield document

    def _draw(self, text: str) -> float:
        return int.from_bytes(hashlib.blake2b(self._key + text.encode(), digest_size=8).digest()) / 2**64


def _record(
    where: str, item: Any, text_field: str | None, domain_field: str | None, domain: str, rename: Mapping[str, str]
) -> Document | BadRecord:
    try:
        if isinstance(item, BadItemError):
            raise item
        if domain_field is not None:
            named = _string(item, domain_field, "domain_field")
            # It will be in files, tables and on screens.
            if any(unicodedata.category(character) == "Cc" for character in named):
                raise BadItemError(f"{domain_field!r} holds control characters")
            domain = rename.get(named, named)
        if text_field is None:
            if not isinstance(item, dict):
                raise BadItemError(f"is not a JSON object but {type(item).__name__}")
            return Document("", domain, where, item)
        return Document(_string(item, text_field, "text_field"), domain, where)
    except BadItemError as why:
        return BadRecord(where, str(why), domain)


def _string(item: Any, field: str, setting: str) -> str:
    if not isinstance(item, dict):
        raise BadItemError(f"is not a JSON object but {type(item).__name__}")
    value: Any = item.get(field)
    if field not in item:  # a.b.c is item[a][b][c]
        value = item
        for key in field.split("."):
            value = value.get(key) if isinstance(value, dict) else None
    if value is None and field in item:
        raise BadItemError(f"{field!r} is null")
    if value is None:
        keys = [f"{key:.40}" for key in item][:_MOST_KEYS] + ["..."] * (len(item) > _MOST_KEYS)
        raise BadItemError(f"has no {field!r} (it has {', '.join(keys) or 'nothing'}; see {setting})")
    if not isinstance(value, str):
        raise BadItemError(f"{field!r} is not a string but {type(value).__name__}")
    if not value.strip():
        raise BadItemError(f"{field!r} is blank")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair, which no tokenizer can encode
        raise BadItemError(f"{field!r} is not valid Unicode (half a surrogate pair)") from None
    return value
