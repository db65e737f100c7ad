"""The corpus of a run: what a token store depends on, and the store itself, opened or made in the run's own process.

`prepare` opens `data.prepared`, or tokenises `data.sources` and keeps the store in `<data.cache>/corpus/<fingerprint>`.
A store is written into a folder of another name, which is renamed when the store is whole. So a store that exists is
finished. `torchtrain.data.tasks` makes stores by many processes.
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

from filelock import FileLock, Timeout

from anchorline import corpora
from anchorline.environment import version
from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import PARTIAL, commit, expand
from torchtrain.config import DataConfig, Source
from torchtrain.data.corpus import make_filters, read, source_files
from torchtrain.data.encode import special_id
from torchtrain.data.files import FileInfo, is_url
from torchtrain.data.store import HEADER, SourceCount, TokenStore
from torchtrain.data.writer import PreparationProgress, Tokeniser, read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Report = Callable[[PreparationProgress], None]

# Increase it when the same sources and settings give other tokens or other files (reading, rendering, layout).
FORMAT = 3
_MOST_FILES = 1_000_000  # of a data set's folder


# --- what a store depends on ------------------------------------------------------------------------------------------


def identity(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return what a store's tokens depend on besides the tokenizer, as JSON, wherever the store is.

    Files count by name and size. A demo counts by its package's or Python's version, a hub data set by its name,
    subset, split and revision, so that a finished store needs no network: pin `revision` to follow a set that changes.
    Filters count with datatrove's version. A prepared store counts as its sources (`prepare` compares them), or by its
    fingerprint if they are not given. Raises UserError: a missing file or package, or an unknown filter.
    """
    if data.prepared is not None and not data.sources:
        return {"prepared": _open_prepared(data).header.fingerprint}
    content = {
        "format": FORMAT,
        "sources": [_identity_of_source(source) for source in data.sources],
        "eos": special_id(tokenizer, "eos") if data.append_eos else None,
        "min_tokens": data.min_tokens,
        "special_tokens": data.special_tokens,
        "remove_duplicates": data.remove_duplicates,
        "mixture": None if data.mixture is None else data.mixture.model_dump(mode="json"),
    }
    if data.has_answers:
        content["chat_template"] = read_template(data) or tokenizer.chat_template
    return json.loads(json.dumps(content))


def _identity_of_source(source: Source) -> dict[str, Any]:
    content = source.model_dump(exclude={"streaming", *(() if source.filters else ("filters",))})
    if make_filters(source):
        content["datatrove"] = version("datatrove")
    if source.demo is not None:
        content["version"] = corpora.identity(source.demo, f"data.sources: demo {source.demo!r}")
    content["contents"] = [(file.name, file.bytes) for file in _files_of(source)]
    return content


def fingerprint(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return the name of a run's own store: 32 hex digits over identity, tokenizer, and its files' places and times.
    Raises UserError: as `identity`; or the tokenizer is a slow one.
    """
    files = [
        [(f.place if is_url(f.place) else str(Path(f.place).resolve()), f.bytes, f.version) for f in _files_of(source)]
        for source in data.sources
    ]
    content = {"tokenizer": tokenizer_identity(tokenizer), "files": files} | identity(data, tokenizer)
    return digest(content)


def tokenizer_identity(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a SHA-256, as hex, of how a tokenizer encodes. Raises UserError: it is a slow one, which does not say."""
    if not tokenizer.is_fast:
        raise UserError(f"model.source: {type(tokenizer).__name__} is a slow tokenizer; convert it to a tokenizer.json")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    for state in ("truncation", "padding"):  # that calls leave behind and that encoding here does not use
        backend.pop(state, None)
    return hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()


def digest(content: Any) -> str:
    """Return 32 hex digits over a content of JSON."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _files_of(source: Source) -> list[FileInfo]:
    if source.files is not None or source.texts is not None:
        return source_files(source)
    if source.dataset is None or not os.path.isdir(source.dataset):
        return []
    paths = list(itertools.islice(Path(source.dataset).rglob("*"), _MOST_FILES + 1))
    if len(paths) > _MOST_FILES:
        raise UserError(f"data.sources: dataset {quoted(source.dataset)}: more than {_MOST_FILES:,} files; narrow it")
    files = [path for path in sorted(paths) if path.is_file()]
    return [FileInfo(str(path), (status := path.stat()).st_size, status.st_mtime_ns) for path in files]


def check_shares(counts: Iterable[SourceCount], data: DataConfig) -> None:
    """Refuse a source of which too many records are bad."""
    for count in counts:
        if count.bad_records > data.bad_record_share * count.records:
            raise UserError(
                f"data.sources: {count.source}: {count.bad_records} of {count.records} records are bad, a share above "
                f"data.bad_record_share {data.bad_record_share}; the first: {count.first_bad}"
            )


def check_documents(counts: Sequence[SourceCount], documents: int, data: DataConfig) -> None:
    """Refuse a corpus without documents."""
    if documents:
        return
    records, bad = (sum(getattr(count, name) for count in counts) for name in ("records", "bad_records"))
    why = f"{records} records: {bad} bad, {records - bad} filtered or shorter than data.min_tokens {data.min_tokens}"
    raise UserError(f"data.sources: the corpus is empty: {why if records else 'no records'}; check the sources")


@contextmanager
def name_disk_fault(shown: str) -> Iterator[None]:
    """Turn a failed write into a UserError that names the setting."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{shown} cannot be written: {disk_fault(error)}; choose another folder") from None


@contextmanager
def locked(folder: Path, shown: str, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Wait until no other process makes the same store."""
    path = folder.with_name(f".{folder.name}.lock")
    lock = FileLock(path)
    with name_disk_fault(shown):
        folder.parent.mkdir(parents=True, exist_ok=True)
        path.touch()  # filelock waits for ever for a lock that cannot be made
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting   another process prepares {folder}")
            lock.acquire()
        except NotImplementedError as error:
            raise OSError(0, str(error)) from None
    try:
        yield
    finally:
        lock.release()


# --- in a run ---------------------------------------------------------------------------------------------------------


def prepare(data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Report | None = None) -> TokenStore:
    """Return the tokenised corpus of a config: `data.prepared`, or from the cache if it is there, else made now.

    Several processes may call this at once: one works, the others wait and reuse.

    data: sources and settings.
    tokenizer: a fast tokenizer (one with a `tokenizers` backend).
    on_progress: called with the state so far when a source begins, after each full batch, and once at the end.
    Raises UserError: a source cannot be read, gives no document, or has more bad records than `data.bad_record_share`;
        the tokenizer is a slow one; `data.cache` cannot be written; `data.prepared` is of something else.
    """
    on_progress = on_progress or (lambda progress: None)
    if data.prepared is not None:
        store = _open_prepared(data)
        _check_prepared(store, data, tokenizer)
        return _reuse(store, data, on_progress)
    final = expand(data.cache) / "corpus" / fingerprint(data, tokenizer)
    if not final.exists():
        shown = f"data.cache {quoted(data.cache)}"
        with locked(final, shown):
            if not final.exists():
                with name_disk_fault(shown):
                    return _tokenise(final, data, tokenizer, on_progress)
    return _reuse(TokenStore.open(final), data, on_progress)


def _reuse(store: TokenStore, data: DataConfig, on_progress: Report) -> TokenStore:
    check_shares(store.header.sources, data)
    on_progress(sum_progress("tokens reused", [store]))
    return store


def sum_progress(state: str, stores: Iterable[TokenStore]) -> PreparationProgress:
    """Return what stores hold together."""
    stores = list(stores)
    bad = sum(count.bad_records for store in stores for count in store.header.sources)
    return PreparationProgress(state, sum(map(len, stores)), sum(store.token_count for store in stores), bad)


def _open_prepared(data: DataConfig) -> TokenStore:
    shown = f"data.prepared {quoted(data.prepared)}"
    folder = expand(data.prepared or "")
    if not (folder / HEADER).is_file():
        missing = f"holds no finished token store ({HEADER} is missing)" if folder.exists() else "is not there"
        raise UserError(f"{shown}: {missing}; make one: torchtrain prepare CONFIG --out FOLDER")
    store = TokenStore.open(folder)
    if store.header.made_of is None:
        raise UserError(f"{shown}: was not made by torchtrain prepare; give such a store, or data.sources alone")
    return store


def _check_prepared(store: TokenStore, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> None:
    shown = f"data.prepared {quoted(data.prepared)}"
    if store.header.tokenizer != tokenizer_identity(tokenizer):
        raise UserError(f"{shown}: was tokenised by another tokenizer; prepare it with that of model.source")
    if data.sources and store.header.made_of != identity(data.model_copy(update={"prepared": None}), tokenizer):
        raise UserError(
            f"{shown}: is of other sources or settings than this config's; prepare it again, or remove data.sources"
        )


def _tokenise(final: Path, data: DataConfig, tokenizer: "PreTrainedTokenizerFast", on_progress: Report) -> TokenStore:
    """Make a store in this process. A failure leaves nothing behind."""
    tokeniser = Tokeniser(data, tokenizer)
    partial = final.with_name(final.name + PARTIAL)
    shutil.rmtree(partial, ignore_errors=True)  # of a process that died
    partial.mkdir()
    try:
        with tokeniser.writer(partial) as writer:
            counts = []
            for source in data.sources:
                counts.append(tokeniser.add(source, read(source), writer, on_progress))
                check_shares(counts[-1:], data)
            check_documents(counts, writer.documents, data)
            writer.finish(final.name, counts, data.mixture, data.remove_duplicates)
        commit(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    on_progress(PreparationProgress("tokenised", writer.documents, writer.tokens, writer.bad_records))
    return TokenStore.open(final)
