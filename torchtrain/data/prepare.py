"""Tokenise a corpus once: sources -> records -> tokens -> a TokenStore under `<data.cache>/corpus/<fingerprint>`.

The fingerprint covers everything that the tokens depend on. A store is written into a folder beside its place and renamed
when it is whole, so a store that exists is finished, whatever was interrupted.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from anchorline.errors import UserError
from anchorline.files import expanded, sync
from torchtrain.config import DataConfig, Source
from torchtrain.data import demo
from torchtrain.data.corpus import BadRecord, Record, read, source_files, source_name
from torchtrain.data.store import SourceCount, StoreWriter, TokenStore

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Raise it when the same sources and settings would give other tokens or other files (reading, rendering, layout).
FORMAT = 2
# Text handed to the tokenizer at one time: enough for all its threads, little beside the model.
_BATCH_CHARACTERS = 4_000_000


@dataclass(frozen=True)
class Progress:
    """How far a preparation is: what it does, and over all sources the documents and tokens written, the bad records met."""

    state: str  # `tokenising NAME` of a source, then `tokenised`; `tokens reused` if a finished store was found
    documents: int
    tokens: int
    bad_records: int

    def __str__(self) -> str:
        counts = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.bad_records:,} bad records"
        return f"{self.state}: {counts}"


def prepare(
    data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Callable[[Progress], None] | None = None
) -> TokenStore:
    """Return the tokenised corpus of a config, from the cache if it is there, else made now.

    Several processes may call this at once: one works, the others wait and reuse.

    Args:
        data: sources and settings.
        tokenizer: a fast tokenizer (one with a `tokenizers` backend).
        on_progress: called with the state so far when a source begins, after each full batch, and once at the end.

    Raises:
        UserError: a source cannot be read, gives no document, or has more bad records than `data.bad_record_share`; the
            tokenizer is a slow one; `data.cache` cannot be written.
    """
    report = on_progress or (lambda progress: None)
    name = fingerprint(data, tokenizer)
    corpus = expanded(data.cache) / "corpus"
    final = corpus / name
    if not final.exists():
        lock = FileLock(corpus / f".{name}.lock")
        try:
            corpus.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise UserError(f"data.cache {data.cache!r} cannot be written: {error}; choose another folder") from None
        try:
            if not final.exists():
                return _make(final, data, tokenizer, report)
        finally:
            lock.release()
    store = TokenStore.open(final)
    for count in store.sources:
        _check_share(count, data)
    report(Progress("tokens reused", len(store), len(store.tokens), sum(count.bad_records for count in store.sources)))
    return store


def fingerprint(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the name of the store that a config and a tokenizer give: 32 hex digits over all that its tokens depend on.

    Raises:
        UserError: as `prepare`, for a missing file and package and for a tokenizer that does not fit.
    """
    content = identity(data, tokenizer) | {
        "tokenizer": tokenizer_identity(tokenizer),
        "files": [[_looks(path) for path in _files(source)] for source in data.sources],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def identity(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return what a store's tokens depend on besides the tokenizer, as JSON, wherever it lies.

    Files count by name and size here, by place and time of change, too, for `fingerprint`: where those differ, the same tokens
    may come of it or not (`TokenStore.sha256`). A demo counts by its package's or Python's version; a hub data set by its name,
    subset, split and revision, so that a finished store needs no network: pin `revision` to follow a set that changes.

    Raises:
        UserError: a missing file or package.
    """
    content = {
        "format": FORMAT,
        "sources": [_source_identity(source) for source in data.sources],
        "eos": tokenizer.eos_token_id if data.append_eos else None,
        "min_tokens": data.min_tokens,
    }
    return json.loads(json.dumps(content))


def _source_identity(source: Source) -> dict[str, Any]:
    identity = source.model_dump(exclude={"streaming"})
    if source.demo is not None:
        identity["version"] = demo.identity(source.demo)
    identity["contents"] = [(path.name, path.stat().st_size) for path in _files(source)]
    return identity


def _files(source: Source) -> list[Path]:
    if source.files is not None:
        return source_files(source)
    if source.dataset is not None and Path(source.dataset).is_dir():
        return sorted(path for path in Path(source.dataset).rglob("*") if path.is_file())
    return []


def _looks(path: Path) -> tuple[str, int, int]:
    return str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns


def tokenizer_identity(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a SHA-256, as hex, of how a tokenizer encodes.

    Raises:
        UserError: it is a slow one, which does not tell.
    """
    if not tokenizer.is_fast:
        raise UserError(f"model.source: {type(tokenizer).__name__} is a slow tokenizer; convert it to a tokenizer.json")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # State that calls leave behind and that encoding here does not use.
    for state in ("truncation", "padding"):
        backend.pop(state, None)
    return hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()


def _make(
    final: Path, data: DataConfig, tokenizer: "PreTrainedTokenizerFast", report: Callable[[Progress], None]
) -> TokenStore:
    partial = final.with_name(f"{final.name}.partial")
    try:
        # The lock is held: what lies here was left by a process that died.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        with StoreWriter(partial) as writer:
            counts = [_add_source(source, data, tokenizer, writer, report) for source in data.sources]
            if not writer.documents:
                records, bad = sum(count.records for count in counts), writer.bad_records
                found = f"{records} records: {bad} bad, {records - bad} shorter than data.min_tokens {data.min_tokens}"
                raise UserError(
                    f"data.sources: the corpus is empty: {found if records else 'no records'}; check the sources"
                )
            writer.finish(final.name, counts)
        partial.rename(final)
        sync(final.parent)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise UserError(f"data.cache {data.cache!r} cannot be written: {error}; choose another folder") from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    report(Progress("tokenised", writer.documents, writer.tokens, writer.bad_records))
    return TokenStore.open(final)


def _add_source(
    source: Source,
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerFast",
    writer: StoreWriter,
    report: Callable[[Progress], None],
) -> SourceCount:
    records, bad, first_bad = 0, 0, ""
    batch: list[Record] = []
    characters = 0

    def tell() -> None:
        state = f"tokenising {source_name(source)}"
        report(Progress(state, writer.documents, writer.tokens, writer.bad_records))

    tell()
    for record in read(source):
        records += 1
        if isinstance(record, BadRecord):
            bad += 1
            first_bad = first_bad or str(record)
            writer.skip_bad(record.domain, str(record))
            continue
        batch.append(record)
        characters += len(record.text)
        if characters >= _BATCH_CHARACTERS:
            _add_batch(batch, data, tokenizer, writer)
            batch, characters = [], 0
            tell()
    if batch:
        _add_batch(batch, data, tokenizer, writer)
    count = SourceCount(source_name(source), records, bad, first_bad)
    _check_share(count, data)
    return count


def _add_batch(
    batch: list[Record], data: DataConfig, tokenizer: "PreTrainedTokenizerFast", writer: StoreWriter
) -> None:
    # verbose=False: a document longer than the model's context is no mistake here, so no warning about it.
    texts = [record.text for record in batch]
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
    eos = [tokenizer.eos_token_id] if data.append_eos and tokenizer.eos_token_id is not None else []
    for record, ids in zip(batch, encoded["input_ids"], strict=True):
        if len(ids) < data.min_tokens:
            writer.skip_short(record.domain, len(ids))
        else:
            writer.add(record.domain, ids + eos)


def _check_share(count: SourceCount, data: DataConfig) -> None:
    if count.bad_records > data.bad_record_share * count.records:
        raise UserError(
            f"data.sources: {count.source}: {count.bad_records} of {count.records} records are bad, a share above "
            f"data.bad_record_share {data.bad_record_share}; the first: {count.first_bad}"
        )
