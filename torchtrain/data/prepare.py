"""The corpus of a run: a store that `torchtrain prepare` made, or one that is tokenised now, in this process, and kept
under `<data.cache>/corpus/<fingerprint>`.

The fingerprint covers everything that the tokens depend on. A store is written into a folder beside its place and
renamed when it is whole, so a store that exists is finished, whatever was interrupted.
"""

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from anchorline import corpora
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import PARTIAL, commit, expand
from torchtrain.config import DataConfig, Source
from torchtrain.data.corpus import read, source_files
from torchtrain.data.remote import FileInfo, is_url
from torchtrain.data.store import HEADER, SourceCount, TokenStore
from torchtrain.data.tokenise import PreparationProgress, Tokeniser, token_bytes_of
from torchtrain.data.writer import StoreWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Raise it when the same sources and settings would give other tokens or other files (reading, rendering, layout).
FORMAT = 3
_MOST_FILES = 1_000_000  # of a data set's folder


def prepare(
    data: DataConfig,
    tokenizer: "PreTrainedTokenizerFast",
    on_progress: Callable[[PreparationProgress], None] | None = None,
) -> TokenStore:
    """Return the tokenised corpus of a config: `data.prepared`, or from the cache if it is there, else made now.

    Several processes may call this at once: one works, the others wait and reuse.

    Args:
        data: sources and settings.
        tokenizer: a fast tokenizer (one with a `tokenizers` backend).
        on_progress: called with the state so far when a source begins, after each full batch, and once at the end.

    Raises:
        UserError: a source cannot be read, gives no document, or has more bad records than `data.bad_record_share`; the
            tokenizer is a slow one; `data.cache` cannot be written; `data.prepared` is of something else.
    """
    report = on_progress or (lambda progress: None)
    if data.prepared is not None:
        return _reuse(_check_prepared(_open_prepared(data), data, tokenizer), data, report)
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
                return _make(final, data, tokenizer, report)
        finally:
            lock.release()
    return _reuse(TokenStore.open(final), data, report)


def _reuse(store: TokenStore, data: DataConfig, report: Callable[[PreparationProgress], None]) -> TokenStore:
    check_shares(store.header.sources, data)
    bad = sum(count.bad_records for count in store.header.sources)
    report(PreparationProgress("tokens reused", len(store), store.token_count, bad))
    return store


def _open_prepared(data: DataConfig) -> TokenStore:
    shown = f"data.prepared {quoted(data.prepared)}"
    folder = expand(data.prepared or "")
    if not folder.exists():
        raise UserError(f"{shown}: is not there; make it: torchtrain prepare CONFIG --out {folder}")
    if not (folder / HEADER).is_file():
        raise UserError(
            f"{shown}: holds no finished token store ({HEADER} is missing); make one elsewhere: torchtrain prepare "
            "CONFIG --out FOLDER"
        )
    store = TokenStore.open(folder)
    if store.header.made_of is None:
        raise UserError(f"{shown}: was not made by torchtrain prepare; give such a store, or data.sources alone")
    return store


def _check_prepared(store: TokenStore, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> TokenStore:
    shown = f"data.prepared {quoted(data.prepared)}"
    if store.header.tokenizer != tokenizer_identity(tokenizer):
        raise UserError(f"{shown}: was tokenised by another tokenizer; prepare it with that of model.source")
    if data.sources and store.header.made_of != identity(data.model_copy(update={"prepared": None}), tokenizer):
        raise UserError(
            f"{shown}: is of other sources or settings than this config's; prepare it again, or remove data.sources"
        )
    return store


def fingerprint(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the name of the store of a config and a tokenizer: 32 hex digits over all that its tokens depend on.

    Raises:
        UserError: as `prepare`, for a missing file and package and for a tokenizer that does not fit.
    """
    content = identity(data, tokenizer) | {
        "tokenizer": tokenizer_identity(tokenizer),
        "files": [[_looks(file) for file in _files(source)] for source in data.sources],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def identity(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return what a store's tokens depend on besides the tokenizer, as JSON, wherever it lies.

    Files count by name and size here, by place and time of change, too, for `fingerprint`: where those differ, the same
    tokens may come of it or not (`TokenStore.sha256`). A demo counts by its package's or Python's version; a hub data
    set by its name, subset, split and revision, so that a finished store needs no network: pin `revision` to follow a
    set that changes. A prepared store counts as the sources that it is of (`prepare` compares), by its fingerprint
    where they are not given.

    Raises:
        UserError: a missing file or package.
    """
    if data.prepared is not None and not data.sources:
        return {"prepared": _open_prepared(data).header.fingerprint}
    content = {
        "format": FORMAT,
        "sources": [_source_identity(source) for source in data.sources],
        "eos": tokenizer.eos_token_id if data.append_eos else None,
        "min_tokens": data.min_tokens,
        "special_tokens": data.special_tokens,
        "near_duplicates": data.near_duplicates,
        "remove_duplicates": data.remove_duplicates,
        "mixture": None if data.mixture is None else data.mixture.model_dump(mode="json"),
    }
    return json.loads(json.dumps(content))


def _source_identity(source: Source) -> dict[str, Any]:
    identity = source.model_dump(exclude={"streaming"})
    if source.demo is not None:
        identity["version"] = corpora.identity(source.demo, f"data.sources: demo {source.demo!r}")
    identity["contents"] = [(file.name, file.bytes) for file in _files(source)]
    return identity


def _files(source: Source) -> list[FileInfo]:
    if source.files is not None or source.texts is not None:
        return source_files(source)
    if source.dataset is None or not os.path.isdir(source.dataset):
        return []
    found = list(itertools.islice(Path(source.dataset).rglob("*"), _MOST_FILES + 1))
    if len(found) > _MOST_FILES:
        raise UserError(
            f"data.sources: dataset {quoted(source.dataset)}: holds more than {_MOST_FILES:,} files; narrow it"
        )
    return [
        FileInfo(str(path), (status := path.stat()).st_size, status.st_mtime_ns)
        for path in sorted(found)
        if path.is_file()
    ]


def _looks(file: FileInfo) -> tuple[str, int, str | int]:
    return file.place if is_url(file.place) else str(Path(file.place).resolve()), file.bytes, file.version


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
    tokeniser = Tokeniser(data, tokenizer)
    with _commits(final, data) as partial, StoreWriter(partial, token_bytes_of(tokenizer)) as writer:
        counts = []
        for source in data.sources:
            counts.append(tokeniser.add(source, read(source), writer, report))
            check_shares(counts[-1:], data)
        check_documents(counts, writer.documents, data)
        writer.finish(final.name, counts, data.mixture, data.remove_duplicates)
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


def check_shares(counts: Iterable[SourceCount], data: DataConfig) -> None:
    """Refuse a source of which too many records are bad.

    Raises:
        UserError: more than `data.bad_record_share`.
    """
    for count in counts:
        if count.bad_records > data.bad_record_share * count.records:
            raise UserError(
                f"data.sources: {count.source}: {count.bad_records} of {count.records} records are bad, a share above "
                f"data.bad_record_share {data.bad_record_share}; the first: {count.first_bad}"
            )


def check_documents(counts: Sequence[SourceCount], documents: int, data: DataConfig) -> None:
    """Refuse a corpus without documents.

    Raises:
        UserError: there is none.
    """
    if documents:
        return
    records, bad = (sum(getattr(count, name) for count in counts) for name in ("records", "bad_records"))
    found = f"{records} records: {bad} bad, {records - bad} shorter than data.min_tokens {data.min_tokens}"
    raise UserError(f"data.sources: the corpus is empty: {found if records else 'no records'}; check the sources")
