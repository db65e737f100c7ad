"""Writes token stores: a shard from records, or one store from many shards. A failed write never counts as a store."""

import hashlib
import io
import os
import shutil
from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import FileEntry, expand, read_file, sync, write_file
from torchtrain.config import DataConfig, MixtureConfig, Source
from torchtrain.data.answers import Answered, AnswerEncoder
from torchtrain.data.corpus import BadRecord, Document, FilteredRecord, Record, source_name
from torchtrain.data.encode import BATCH_CHARACTERS, Encoder, special_id
from torchtrain.data.files import BadItemError
from torchtrain.data.mixture import draw_repeats
from torchtrain.data.store import (
    BAD_RECORDS,
    DOMAINS,
    HASHES,
    HEADER,
    OFFSETS,
    REPEATS,
    TOKEN_TYPES,
    DomainSummary,
    ShardSize,
    SourceCount,
    StoreHeader,
    TokenStore,
    find_firsts,
    hash_tokens,
    targets_name,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MOST_TEMPLATE_BYTES = 1 << 20
_COUNTS = ("documents", "tokens", "bad_records", "short_documents", "short_tokens")  # of a domain, that add up


@dataclass(frozen=True)
class PreparationProgress:
    """How far a preparation is: its state, and the documents, tokens and bad records of all sources so far."""

    state: str  # `tokenising NAME` of a source, then `tokenised`; `task 3 of 6`; or `tokens reused`
    documents: int
    tokens: int
    bad_records: int

    def __str__(self) -> str:
        counts = f"{self.documents:,} documents, {self.tokens:,} tokens, {self.bad_records:,} bad records"
        return f"{self.state}: {counts}"


def read_template(data: DataConfig) -> str | None:
    """Return the chat template of `data.chat_template`. Raises UserError if the file cannot be read."""
    if data.chat_template is None:
        return None
    try:
        return read_file(expand(data.chat_template), _MOST_TEMPLATE_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = disk_fault(error) if isinstance(error, OSError) else "is not UTF-8"
        raise UserError(f"data.chat_template {quoted(data.chat_template)}: {reason}; give a file of Jinja") from None


class Tokeniser:
    """Tokenises records of a corpus into a store, in a run's own process or in a task's."""

    def __init__(self, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._data, self._encoder = data, Encoder(tokenizer, data.special_tokens)
        eos = special_id(tokenizer, "eos") if data.append_eos else None
        self._eos = np.array([] if eos is None else [eos], dtype=np.int32)
        self._answers = AnswerEncoder(tokenizer, data.special_tokens, data.append_eos, read_template(data))
        self._has = data.has_answers, data.has_weights
        largest = max(tokenizer.get_vocab().values(), default=0)
        self._token_bytes = 2 if largest < 1 << 16 else 4

    def writer(self, folder: Path) -> "StoreWriter":
        """Return a writer whose tokens have the bytes that this vocabulary needs."""
        return StoreWriter(folder, self._token_bytes, *self._has)

    def add(
        self,
        source: Source,
        records: Iterable[Record],
        writer: "StoreWriter",
        report: Callable[[PreparationProgress], None] = lambda progress: None,
    ) -> SourceCount:
        """Tokenise what is read of a source; return what that was. report: called at first and after each full batch.

        Raises UserError: as `torchtrain.data.corpus.read`. Raises OSError: a write failed.
        """
        name, number, bad, first_bad, special = source_name(source), 0, 0, "", 0
        batch: list[tuple[Document, Answered | None]] = []
        characters = 0

        def report_batch() -> None:
            state = f"tokenising {name}"
            report(PreparationProgress(state, writer.documents, writer.tokens, writer.bad_records))

        report_batch()
        for record in records:
            number += 1
            if isinstance(record, FilteredRecord):
                continue
            answered = None
            if isinstance(record, Document):
                try:
                    if record.fields is not None and source.records != "text":
                        answered = self._answers.encode(record.fields, source.records)
                    elif self._encoder.too_long(record.text):
                        raise BadItemError(f"{len(record.text):,} characters without a place to cut")
                except BadItemError as why:
                    record = BadRecord(record.where, str(why), record.domain)
            if isinstance(record, BadRecord):
                bad += 1
                first_bad = first_bad or str(record)
                writer.skip_bad(record.domain, str(record))
                continue
            special += self._encoder.looks_special(record.text)
            batch.append((record, answered))
            characters += len(record.text) if answered is None else len(answered.tokens)
            if characters >= BATCH_CHARACTERS:
                self._add_batch(batch, writer)
                batch, characters = [], 0
                report_batch()
        self._add_batch(batch, writer)
        return SourceCount(name, number, bad, first_bad, special)

    def _add_batch(self, batch: Sequence[tuple[Document, Answered | None]], writer: "StoreWriter") -> None:
        encoded = self._encoder.encode([record.text for record, answered in batch if answered is None])
        for record, answered in batch:
            ids = next(encoded) if answered is None else answered.tokens
            if len(ids) < self._data.min_tokens:
                writer.skip_short(record.domain, len(ids))
            elif answered is not None:
                writer.add(record.domain, ids, targets=answered.targets)
            else:
                writer.add(record.domain, np.append(ids, self._eos))


class StoreWriter:
    """Writes a store into an empty folder of its own; the store exists once `finish` has returned.

    Every write is checked, all files are flushed to the disk, and sizes are read back. An OSError says what failed.

    folder: it exists and is empty.
    token_bytes: 2 if every token is below 65,536, else 4.
    has_targets: keep which tokens are targets.
    has_weights: keep what each target's loss counts, too.
    """

    def __init__(
        self, folder: Path, token_bytes: int = 4, has_targets: bool = False, has_weights: bool = False
    ) -> None:
        self.folder, self._type = folder, TOKEN_TYPES[token_bytes]
        self._target_type = np.float32 if has_weights else np.bool_
        self.offsets = array("q", [0])
        self.document_domains = array("i")
        self.hashes = array("Q")
        self.domain_ids: dict[str, int] = {}
        self.largest_token = -1
        self.bad_records = 0
        self._skipped: dict[str, dict[str, int]] = {}
        self._digest = hashlib.sha256()  # of the tokens as int32, however they are stored
        self._tokens = _GrowingFile(folder / _shard_name(0))
        self._targets = _GrowingFile(folder / targets_name(_shard_name(0))) if has_targets else None
        self._bad = _GrowingFile(folder / BAD_RECORDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._tokens, self._targets, self._bad):
            if file is not None:
                file.close()

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self.document_domains)

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self.offsets[-1]

    def add(self, domain: str, ids: Sequence[int] | np.ndarray, targets: np.ndarray | None = None) -> None:
        """Append one document. `targets`: bool, or float32 weights, [tokens]; None: all."""
        tokens = np.asarray(ids, dtype=np.int32)
        largest = int(tokens.max())
        assert largest <= np.iinfo(self._type).max, "a token that the store's type does not hold"
        self._digest.update(tokens.data)
        # Not `tofile`, which loses the failure of its last write.
        self._tokens.write(tokens.astype(self._type, copy=False).tobytes())
        if self._targets is not None:
            targets = np.ones(len(tokens)) if targets is None else targets
            self._targets.write(targets.astype(self._target_type).tobytes())
        self.hashes.append(hash_tokens(tokens))
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.document_domains.append(self.domain_ids.setdefault(domain, len(self.domain_ids)))
        self.largest_token = max(self.largest_token, largest)

    def skip_short(self, domain: str, tokens: int) -> None:
        """Count a document that is left out because it is short."""
        counts = self._counts(domain)
        counts["short_documents"] += 1
        counts["short_tokens"] += tokens

    def skip_bad(self, domain: str, line: str) -> None:
        """Count and note a record that gave no document."""
        self._counts(domain)["bad_records"] += 1
        self.bad_records += 1
        self._bad.write(f"{line}\n".encode())

    def finish(
        self,
        fingerprint: str,
        sources: list[SourceCount],
        mixture: MixtureConfig | None = None,
        remove_duplicates: bool = False,
    ) -> None:
        """Write what completes the store and flush all of it to the disk.

        mixture: how often which documents are taken.
        remove_duplicates: take only the first document of a text.
        Raises UserError: the mixture does not fit the corpus.
        """
        offsets = np.array(self.offsets, dtype=np.int64)
        document_domains = np.array(self.document_domains, dtype=np.int32)
        lengths, summaries = np.diff(offsets), []
        for domain in dict.fromkeys([*self.domain_ids, *self._skipped]):
            own = lengths[document_domains == self.domain_ids.get(domain, -1)]
            kept = {"documents": len(own), "tokens": int(own.sum()), "longest": int(own.max(initial=0))}
            summaries.append(DomainSummary(domain, **kept, **self._counts(domain)))
        files = {_shard_name(0): self._tokens.finish(), BAD_RECORDS: self._bad.finish()}
        if self._targets is not None:
            files[targets_name(_shard_name(0))] = self._targets.finish()
        header = StoreHeader(
            fingerprint=fingerprint,
            sha256=self._digest.hexdigest(),
            domains=list(self.domain_ids),
            largest_token=self.largest_token,
            summaries=summaries,
            sources=sources,
            files=files,
            has_targets=self._targets is not None,
            has_weights=self._target_type is np.float32,
            token_bytes=np.dtype(self._type).itemsize,
            shards=[ShardSize(_shard_name(0), self.documents, self.tokens)],
        )
        hashes = np.array(self.hashes, dtype=np.uint64)
        _write_index(self.folder, header, offsets, document_domains, hashes, mixture, remove_duplicates)

    def _counts(self, domain: str) -> dict[str, int]:
        return self._skipped.setdefault(domain, {"bad_records": 0, "short_documents": 0, "short_tokens": 0})


def join_shards(
    shards: Sequence[TokenStore],
    folder: Path,
    fingerprint: str,
    sources: list[SourceCount],
    mixture: MixtureConfig | None,
    remove_duplicates: bool,
    **header_fields: Any,
) -> None:
    """Make, in an empty folder, one store of the stores that tasks left, in their order; their tokens are linked.

    A shard without documents gives only its counts. Raises OSError: a write failed. Raises UserError: the mixture does
    not fit the corpus.
    """
    held = [shard for shard in shards if len(shard)]
    domain_ids: dict[str, int] = {}
    offsets, domains, tokens = [np.zeros(1, dtype=np.int64)], [], 0
    files: dict[str, FileEntry] = {}
    for number, shard in enumerate(held):
        ids = [domain_ids.setdefault(domain, len(domain_ids)) for domain in shard.domains]
        for name in (str, targets_name) if shard.header.has_targets else (str,):
            _link_or_copy(shard.folder / name(_shard_name(0)), folder / name(_shard_name(number)))
            files[name(_shard_name(number))] = shard.header.files[name(_shard_name(0))]
        offsets.append(shard.offsets[1:] + tokens)
        domains.append(np.array(ids, dtype=np.int32)[shard.document_domains])
        tokens += shard.token_count
    files[BAD_RECORDS] = write_file(folder / BAD_RECORDS, *(shard.bad_records.read_bytes() for shard in shards))
    digests = [shard.header.sha256 for shard in held]
    header = StoreHeader(
        fingerprint=fingerprint,
        sha256=digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest(),
        domains=list(domain_ids),
        largest_token=max(shard.header.largest_token for shard in shards),
        summaries=_add_summaries(domain_ids, (summary for shard in shards for summary in shard.header.summaries)),
        sources=sources,
        files=files,
        token_bytes=shards[0].header.token_bytes,
        has_targets=shards[0].header.has_targets,
        has_weights=shards[0].header.has_weights,
        shards=[ShardSize(_shard_name(n), len(shard), shard.token_count) for n, shard in enumerate(held)],
        **header_fields,
    )
    hashes = np.concatenate([shard.content_hashes for shard in held])
    ends, of_documents = np.concatenate(offsets), np.concatenate(domains)
    _write_index(folder, header, ends, of_documents, hashes, mixture, remove_duplicates)


def _add_summaries(domains: Iterable[str], summaries: Iterable[DomainSummary]) -> list[DomainSummary]:
    """Add up what tasks counted; domains that have documents come first, in their order."""
    totals: dict[str, DomainSummary | None] = dict.fromkeys(domains)
    for one in summaries:
        if (so_far := totals.get(one.domain)) is not None:
            counts = {name: getattr(so_far, name) + getattr(one, name) for name in _COUNTS}
            one = DomainSummary(one.domain, longest=max(so_far.longest, one.longest), **counts)
        totals[one.domain] = one
    return [one for one in totals.values() if one is not None]


def _write_index(
    folder: Path,
    header: StoreHeader,
    offsets: np.ndarray,
    document_domains: np.ndarray,
    hashes: np.ndarray,
    mixture: MixtureConfig | None,
    remove_duplicates: bool,
) -> None:
    """Complete a store of n documents: offsets int64 [n + 1], document_domains int32 [n], hashes uint64 [n], header."""
    arrays = {OFFSETS: offsets, DOMAINS: document_domains, HASHES: hashes}
    kept = np.ones(len(hashes), dtype=bool)
    if remove_duplicates:
        kept = find_firsts(hashes)
        arrays[REPEATS] = kept.astype(np.uint16)
    if mixture is not None:
        arrays[REPEATS] = np.zeros(len(kept), dtype=np.uint16)
        chosen = np.diff(offsets)[kept], document_domains[kept]
        arrays[REPEATS][kept] = draw_repeats(*chosen, header.domains, mixture)
    files = dict(header.files)
    for name, content in arrays.items():
        buffer = io.BytesIO()  # not `np.save` into the file, which loses the failure of its last write
        np.save(buffer, content)
        files[name] = write_file(folder / name, buffer.getbuffer())
    settings = {
        "files": files,
        "mixture": None if mixture is None else mixture.model_dump(mode="json"),
        "duplicates_removed": remove_duplicates,
    }
    files = files | {HEADER: write_file(folder / HEADER, header.model_copy(update=settings).dump())}
    for name, entry in files.items():
        if (size := (folder / name).stat().st_size) != entry.bytes:
            raise OSError(5, f"{size:,} bytes are on the disk and {entry.bytes:,} were written", str(folder / name))
    sync(folder)


def _shard_name(number: int) -> str:
    return f"tokens-{number:05d}.bin"


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class _GrowingFile:
    """A file that is written bit by bit, counted and digested on the way."""

    def __init__(self, path: Path) -> None:
        self._digest, self._size = hashlib.sha256(), 0
        self._file = path.open("xb", buffering=1 << 20)

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._digest.update(content)
        self._size += len(content)

    def finish(self) -> FileEntry:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileEntry(bytes=self._size, sha256=self._digest.hexdigest())

    def close(self) -> None:
        """Close it, finished or not. The failure of a last write of what is given up does not count."""
        with suppress(OSError):
            self._file.close()
