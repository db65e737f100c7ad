"""Tokenise a corpus once: sources -> records -> tokens -> a TokenStore under `<data.cache>/corpus/<fingerprint>`.

The fingerprint covers everything that the tokens depend on. A store is written into a folder beside its place and
renamed when it is whole, so a store that exists is finished, whatever was interrupted.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from anchorline import corpora
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import PARTIAL, commit, expand
from torchtrain.config import DataConfig, Source
from torchtrain.data.corpus import BadRecord, Document, read, source_name
from torchtrain.data.encode import BATCH_CHARACTERS, Encoder, special_tokens_of
from torchtrain.data.files import find_files
from torchtrain.data.store import SourceCount, StoreWriter, TokenStore, take_over

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Raise it when the same sources and settings would give other tokens or other files (reading, rendering, layout).
FORMAT = 2
_MOST_FILES = 1_000_000  # of a data set's folder


@dataclass(frozen=True)
class PreparationProgress:
    """How far a preparation is: what it does, and over all sources documents and tokens written, bad records met."""

    state: str  # `tokenising NAME` of a source, then `tokenised`; or `tokens reused`, where a finished store was found
    documents: int
    tokens: int
    bad_records: int

    def __str__(self) -> str:
        counts = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.bad_records:,} bad records"
        return f"{self.state}: {counts}"


def prepare(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerFast",
    on_progress: Callable[[PreparationProgress], None] | None = None,
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
    corpus = expand(data.cache) / "corpus"
    final = corpus / name
    if not os.path.exists(final):
        lock = FileLock(corpus / f".{name}.lock")
        try:
            corpus.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise _unwritable(data, error) from None
        try:
            if not final.exists():
                older = _older(corpus, data, tokenizer)
                if older is None:
                    return _make(final, data, tokenizer, report)
                with _commits(final, data) as partial:
                    take_over(older, partial, name)
        finally:
            lock.release()
    store = TokenStore.open(final)
    for count in store.sources:
        _check_share(count, data)
    report(
        PreparationProgress(
            "tokens reused", len(store), len(store.tokens), sum(count.bad_records for count in store.sources)
        )
    )
    return store


def _older(corpus: Path, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> TokenStore | None:
    """Return the store of the same corpus in which special tokens were control tokens, if its texts hold none: then it
    is the same under `text`. So were all stores before there was a choice.
    """
    if data.special_tokens == "control":
        return None
    before = data.model_copy(update={"special_tokens": "control"})
    try:
        store = TokenStore.open(corpus / fingerprint(before, tokenizer))
        store.verify()
    except UserError:  # there is none, or a damaged one
        return None
    appended = data.append_eos and tokenizer.eos_token_id is not None
    special, block = list(special_tokens_of(tokenizer).values()), 1 << 24
    for start in range(0, len(store.tokens), block):
        found = start + np.flatnonzero(np.isin(store.tokens[start : start + block], special))
        if len(np.setdiff1d(found, store.offsets[1:] - 1) if appended else found):
            return None
    return store


def fingerprint(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the name of the store of a config and a tokenizer: 32 hex digits over all that its tokens depend on.

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

    Files count by name and size here, by place and time of change, too, for `fingerprint`: where those differ, the same
    tokens may come of it or not (`TokenStore.sha256`). A demo counts by its package's or Python's version; a hub data
    set by its name, subset, split and revision, so that a finished store needs no network: pin `revision` to follow a
    set that changes.

    Raises:
        UserError: a missing file or package.
    """
    content = {
        "format": FORMAT,
        "sources": [_source_identity(source) for source in data.sources],
        "eos": tokenizer.eos_token_id if data.append_eos else None,
        "min_tokens": data.min_tokens,
    }
    if data.special_tokens != "control":  # what all stores were before there was a choice
        content["special_tokens"] = data.special_tokens
    return json.loads(json.dumps(content))


def _source_identity(source: Source) -> dict[str, Any]:
    identity = source.model_dump(exclude={"streaming"})
    if source.demo is not None:
        identity["version"] = corpora.identity(source.demo, f"data.sources: demo {source.demo!r}")
    identity["contents"] = [(path.name, path.stat().st_size) for path in _files(source)]
    return identity


def _files(source: Source) -> list[Path]:
    if source.files is not None:
        return find_files(source.files)
    if source.dataset is None or not os.path.isdir(source.dataset):
        return []
    found = list(itertools.islice(Path(source.dataset).rglob("*"), _MOST_FILES + 1))
    if len(found) > _MOST_FILES:
        raise UserError(
            f"data.sources: dataset {quoted(source.dataset)}: holds more than {_MOST_FILES:,} files; narrow it"
        )
    return sorted(path for path in found if path.is_file())


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
    final: Path, data: DataConfig, tokenizer: "PreTrainedTokenizerFast", report: Callable[[PreparationProgress], None]
) -> TokenStore:
    encoder = Encoder(tokenizer, data.special_tokens)
    appended = [tokenizer.eos_token_id] if data.append_eos and tokenizer.eos_token_id is not None else []
    eos = np.array(appended, dtype=np.int32)
    with _commits(final, data) as partial, StoreWriter(partial) as writer:
        counts = [_add_source(source, data, encoder, eos, writer, report) for source in data.sources]
        if not writer.documents:
            records, bad = sum(count.records for count in counts), writer.bad_records
            found = f"{records} records: {bad} bad, {records - bad} shorter than data.min_tokens {data.min_tokens}"
            raise UserError(
                f"data.sources: the corpus is empty: {found if records else 'no records'}; check the sources"
            )
        writer.finish(final.name, counts)
    report(PreparationProgress("tokenised", writer.documents, writer.tokens, writer.bad_records))
    return TokenStore.open(final)


@contextmanager
def _commits(final: Path, data: DataConfig) -> Iterator[Path]:
    """Give an empty folder and rename it when the block is done; nothing is left of one that fails.

    The lock is held.
    """
    partial = final.with_name(final.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that died
        partial.mkdir()
        yield partial
        commit(partial, final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _unwritable(data, error) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _unwritable(data: DataConfig, error: Exception) -> UserError:
    reason = disk_fault(error) if isinstance(error, OSError) else str(error)
    return UserError(f"data.cache {quoted(data.cache)} cannot be written: {reason}; choose another folder")


def _add_source(
    source: Source,
    data: DataConfig,
    encoder: Encoder,
    eos: np.ndarray,
    writer: StoreWriter,
    report: Callable[[PreparationProgress], None],
) -> SourceCount:
    records, bad, first_bad, special = 0, 0, "", 0
    batch: list[Document] = []
    characters = 0

    def tell() -> None:
        state = f"tokenising {source_name(source)}"
        report(PreparationProgress(state, writer.documents, writer.tokens, writer.bad_records))

    tell()
    for record in read(source):
        records += 1
        if isinstance(record, Document) and encoder.too_long(record.text):
            record = BadRecord(
                f"record {records}", f"{len(record.text):,} characters without a place to cut", record.domain
            )
        if isinstance(record, BadRecord):
            bad += 1
            first_bad = first_bad or str(record)
            writer.skip_bad(record.domain, str(record))
            continue
        special += encoder.looks_special(record.text)
        batch.append(record)
        characters += len(record.text)
        if characters >= BATCH_CHARACTERS:
            _add_batch(batch, data, encoder, eos, writer)
            batch, characters = [], 0
            tell()
    if batch:
        _add_batch(batch, data, encoder, eos, writer)
    count = SourceCount(source_name(source), records, bad, first_bad, special)
    _check_share(count, data)
    return count


def _add_batch(batch: list[Document], data: DataConfig, encoder: Encoder, eos: np.ndarray, writer: StoreWriter) -> None:
    for record, ids in zip(batch, encoder.encode([record.text for record in batch]), strict=True):
        if len(ids) < data.min_tokens:
            writer.skip_short(record.domain, len(ids))
        else:
            writer.add(record.domain, np.append(ids, eos))


def _check_share(count: SourceCount, data: DataConfig) -> None:
    if count.bad_records > data.bad_record_share * count.records:
        raise UserError(
            f"data.sources: {count.source}: {count.bad_records} of {count.records} records are bad, a share above "
            f"data.bad_record_share {data.bad_record_share}; the first: {count.first_bad}"
        )
