"""What a token store depends on: sources, settings and tokenizer, as JSON and as the digests that name a store."""

import hashlib
import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anchorline import corpora
from anchorline.environment import version
from anchorline.errors import UserError, quoted
from anchorline.files import expand
from torchtrain.config import DataConfig, Source
from torchtrain.data.corpus import make_filters, source_files
from torchtrain.data.encode import special_id
from torchtrain.data.files import FileInfo, is_url
from torchtrain.data.store import HEADER, TokenStore
from torchtrain.data.writer import read_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Increase it when the same sources and settings give other tokens or other files (reading, rendering, layout).
FORMAT = 3
_MOST_FILES = 1_000_000  # of a data set's folder


def identity(data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return what a store's tokens depend on besides the tokenizer, as JSON, wherever the store is.

    Files count by name and size. A demo counts by its package's or Python's version, a hub data set by its name,
    subset, split and revision, so that a finished store needs no network: pin `revision` to follow a set that changes.
    Filters count with datatrove's version. A prepared store counts as its sources (`prepare` compares them), or by its
    fingerprint if they are not given. Raises UserError: a missing file or package, or an unknown filter.
    """
    if data.prepared is not None and not data.sources:
        return {"prepared": open_prepared(data).header.fingerprint}
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
        if not content["chat_template"] and (of := [n for n, x in enumerate(data.sources) if x.records == "messages"]):
            raise UserError(
                f"data.sources.{of[0]}.records messages: the tokenizer has no chat template; set data.chat_template to "
                "a file of Jinja"
            )
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
    """Return the name of a run's store: 32 hex digits over identity, tokenizer, and files. Raises UserError."""
    files = [
        [(f.place if is_url(f.place) else str(Path(f.place).resolve()), f.bytes, f.version) for f in _files_of(source)]
        for source in data.sources
    ]
    content = {"tokenizer": tokenizer_digest(tokenizer), "files": files} | identity(data, tokenizer)
    return digest(content)


def tokenizer_digest(tokenizer: "PreTrainedTokenizerFast") -> str:
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


def open_prepared(data: DataConfig) -> TokenStore:
    """Open the store of `data.prepared`. Raises UserError: there is none, or `torchtrain prepare` did not make it."""
    shown = f"data.prepared {quoted(data.prepared)}"
    folder = expand(data.prepared or "")
    if not (folder / HEADER).is_file():
        missing = f"holds no finished token store ({HEADER} is missing)" if folder.exists() else "is not there"
        raise UserError(f"{shown}: {missing}; make one: torchtrain prepare CONFIG --out FOLDER")
    store = TokenStore.open(folder)
    if store.header.made_of is None:
        raise UserError(f"{shown}: was not made by torchtrain prepare; give such a store, or data.sources alone")
    return store


def check_prepared(store: TokenStore, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> None:
    """Refuse a prepared store of another tokenizer, or of other sources than those that the config gives."""
    shown = f"data.prepared {quoted(data.prepared)}"
    if store.header.tokenizer != tokenizer_digest(tokenizer):
        raise UserError(f"{shown}: was tokenised by another tokenizer; prepare it with that of model.source")
    if data.sources and store.header.made_of != identity(data.model_copy(update={"prepared": None}), tokenizer):
        raise UserError(
            f"{shown}: is of other sources or settings than this config's; prepare it again, or remove data.sources"
        )
