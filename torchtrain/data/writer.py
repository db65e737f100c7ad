"""Writes token stores: a shard by a task, and a store of shards; of what fails nothing is taken for whole."""

import hashlib
import io
import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from anchorline.files import FileEntry, sync, write_file
from torchtrain.config import MixtureConfig
from torchtrain.data.selection import BUCKETS, firsts_of, groups_of, repeats_of
from torchtrain.data.store import (
    BAD_RECORDS,
    DOMAINS,
    HASHES,
    HEADER,
    OFFSETS,
    REPEATS,
    SIGNATURES,
    TOKEN_TYPES,
    DomainSummary,
    ShardSize,
    SourceCount,
    StoreHeader,
    TokenStore,
    hash_of,
)


def _name(shard: int) -> str:
    return f"tokens-{shard:05d}.bin"


class StoreWriter:
    """Writes a store into an empty folder of its own; the store exists once `finish` has returned.

    No write is taken for done: each is checked, all are flushed to the disk, and sizes are read back. OSError says what
    failed.

    Args:
        folder: it exists and is empty.
        token_bytes: 2 where every token is below 65,536, else 4.
    """

    def __init__(self, folder: Path, token_bytes: int = 4) -> None:
        self.folder, self._type = folder, TOKEN_TYPES[token_bytes]
        self.offsets = array("q", [0])
        self.document_domains = array("i")
        self.hashes = array("Q")
        self.signatures = array("Q")
        self.domain_ids: dict[str, int] = {}
        self.largest_token = -1
        self.bad_records = 0
        self._skipped: dict[str, dict[str, int]] = {}
        self._digest = hashlib.sha256()  # of the tokens as int32, however they are stored
        self._tokens = _Growing(folder / _name(0))
        self._bad = _Growing(folder / BAD_RECORDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for file in (self._tokens, self._bad):
            file.leave()

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self.document_domains)

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self.offsets[-1]

    def add(self, domain: str, ids: Sequence[int] | np.ndarray, signature: np.ndarray | None = None) -> None:
        """Append one document; with a signature, uint64 [14], if all have one."""
        tokens = np.asarray(ids, dtype=np.int32)
        largest = int(tokens.max())
        assert largest <= np.iinfo(self._type).max, "a token that the store's type does not hold"
        self._digest.update(tokens.data)
        # Not `tofile`: it goes past Python's buffer by C's, and the last block's failure is nobody's.
        self._tokens.write(tokens.astype(self._type, copy=False).tobytes())
        self.hashes.append(hash_of(tokens))
        if signature is not None:
            self.signatures.extend(signature.tolist())
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
        **told: Any,
    ) -> None:
        """Write what completes the store and flush all of it to the disk.

        Args:
            fingerprint: the store's.
            sources: what was read.
            mixture: how often which documents are taken.
            remove_duplicates: take only the first document of a text.
            told: further fields of its header.

        Raises:
            UserError: the mixture does not fit the corpus.
        """
        offsets = np.array(self.offsets, dtype=np.int64)
        document_domains = np.array(self.document_domains, dtype=np.int32)
        header = StoreHeader(
            fingerprint=fingerprint,
            sha256=self._digest.hexdigest(),
            domains=list(self.domain_ids),
            largest_token=self.largest_token,
            summaries=self._summaries(np.diff(offsets), document_domains),
            sources=sources,
            files={_name(0): self._tokens.finish(), BAD_RECORDS: self._bad.finish()},
            token_bytes=np.dtype(self._type).itemsize,
            shards=[ShardSize(_name(0), self.documents, self.tokens)],
            **told,
        )
        hashes, signatures = (np.array(held, dtype=np.uint64) for held in (self.hashes, self.signatures))
        write_index(self.folder, header, offsets, document_domains, hashes, signatures, mixture, remove_duplicates)

    def _counts(self, domain: str) -> dict[str, int]:
        return self._skipped.setdefault(domain, {"bad_records": 0, "short_documents": 0, "short_tokens": 0})

    def _summaries(self, lengths: np.ndarray, document_domains: np.ndarray) -> list[DomainSummary]:
        summaries = []
        for domain in dict.fromkeys([*self.domain_ids, *self._skipped]):
            own = lengths[document_domains == self.domain_ids.get(domain, -1)]
            kept = {"documents": len(own), "tokens": int(own.sum()), "longest": int(own.max(initial=0))}
            summaries.append(DomainSummary(domain, **kept, **self._counts(domain)))
        return summaries


def write_index(
    folder: Path,
    header: StoreHeader,
    offsets: np.ndarray,
    document_domains: np.ndarray,
    hashes: np.ndarray,
    signatures: np.ndarray,
    mixture: MixtureConfig | None,
    remove_duplicates: bool,
) -> None:
    """Complete a store whose tokens are written: what tells of its documents, and its header.

    Args:
        folder: the store's.
        header: without these files.
        offsets: int64 [documents + 1].
        document_domains: int32 [documents].
        hashes: uint64 [documents].
        signatures: uint64 [documents * 14], or empty.
        mixture: how often which documents are taken.
        remove_duplicates: take only the first document of a text.

    Raises:
        OSError: a write failed.
        UserError: the mixture does not fit the corpus.
    """
    arrays = {OFFSETS: offsets, DOMAINS: document_domains, HASHES: hashes}
    if len(signatures):
        arrays[SIGNATURES] = signatures
    kept = np.ones(len(hashes), dtype=bool)
    if remove_duplicates:
        kept = firsts_of(groups_of(hashes, signatures.reshape(-1, BUCKETS) if len(signatures) else None))
        arrays[REPEATS] = kept.astype(np.uint16)
    if mixture is not None:
        arrays[REPEATS] = np.zeros(len(kept), dtype=np.uint16)
        chosen = np.diff(offsets)[kept], document_domains[kept]
        arrays[REPEATS][kept] = repeats_of(*chosen, header.domains, mixture)
    files = header.files | {name: _write_array(folder / name, content) for name, content in arrays.items()}
    told = {
        "files": files,
        "mixture": None if mixture is None else mixture.model_dump(mode="json"),
        "duplicates_removed": remove_duplicates,
    }
    _finish(folder, header.model_copy(update=told))


class _Growing:
    """A file that is written bit by bit, counted and digested on the way."""

    def __init__(self, path: Path) -> None:
        self._path, self._digest, self._size = path, hashlib.sha256(), 0
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

    def leave(self) -> None:
        """Close it, finished or not: of what is given up, a last failure says nothing new."""
        with suppress(OSError):
            self._file.close()


def _write_array(path: Path, content: np.ndarray) -> FileEntry:
    # Not `np.save` into the file, which loses a failure as `tofile` does.
    buffer = io.BytesIO()
    np.save(buffer, content)
    return write_file(path, buffer.getbuffer())


def _finish(folder: Path, header: StoreHeader) -> None:
    """Write the header of a store whose files are written, and read all sizes back."""
    files = header.files | {HEADER: write_file(folder / HEADER, header.dump())}
    for name, entry in files.items():
        if (size := (folder / name).stat().st_size) != entry.bytes:
            raise OSError(5, f"{size:,} bytes are on the disk and {entry.bytes:,} were written", str(folder / name))
    sync(folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or its content a second place where the disk cannot.

    Raises:
        OSError: neither works.
    """
    try:
        os.link(source, target)
        return
    except OSError:
        pass
    copy = _Growing(target)
    try:
        with source.open("rb") as file:
            while block := file.read(1 << 22):
                copy.write(block)
        copy.finish()
    finally:
        copy.leave()


def join_shards(
    parts: Sequence[TokenStore],
    folder: Path,
    fingerprint: str,
    sources: list[SourceCount],
    mixture: MixtureConfig | None,
    remove_duplicates: bool,
    **told: Any,
) -> None:
    """Make, in an empty folder, one store of the stores that tasks left, in their order; their tokens are linked.

    Args:
        parts: one a task; those without documents have only counts.
        folder: it exists and is empty.
        fingerprint: the new store's.
        sources: what was read by all.
        mixture: how often which documents are taken.
        remove_duplicates: take only the first document of a text.
        told: further fields of its header.

    Raises:
        OSError: a write failed.
        UserError: the mixture does not fit the corpus.
    """
    domain_ids: dict[str, int] = {}
    offsets, domains, hashes = [np.zeros(1, dtype=np.int64)], [], []
    signatures = [np.zeros(0, dtype=np.uint64)]
    files: dict[str, FileEntry] = {}
    sizes: list[ShardSize] = []
    tokens = 0
    bad = _Growing(folder / BAD_RECORDS)
    try:
        for part in parts:
            bad.write(part.bad_records.read_bytes())
            if not len(part):
                continue
            ids = [domain_ids.setdefault(domain, len(domain_ids)) for domain in part.domains]
            name = _name(len(sizes))
            link_or_copy(part.folder / _name(0), folder / name)
            files[name] = part.header.files[_name(0)]
            sizes.append(ShardSize(name, len(part), part.token_count))
            offsets.append(part.offsets[1:] + tokens)
            domains.append(np.array(ids, dtype=np.int32)[part.document_domains])
            hashes.append(part.content_hashes)
            if part.signatures is not None:
                signatures.append(part.signatures.reshape(-1))
            tokens += part.token_count
        files[BAD_RECORDS] = bad.finish()
    finally:
        bad.leave()
    header = StoreHeader(
        fingerprint=fingerprint,
        sha256=_digest_of_shards(parts),
        domains=list(domain_ids),
        largest_token=max(part.header.largest_token for part in parts),
        summaries=_join_summaries(domain_ids, (summary for part in parts for summary in part.header.summaries)),
        sources=sources,
        files=files,
        token_bytes=parts[0].header.token_bytes,
        shards=sizes,
        **told,
    )
    ends, of_documents, contents, signed = map(np.concatenate, (offsets, domains, hashes, signatures))
    write_index(folder, header, ends, of_documents, contents, signed, mixture, remove_duplicates)


def _digest_of_shards(parts: Sequence[TokenStore]) -> str:
    """Return a digest of all tokens: of the one part that has any its own, else of theirs in order."""
    digests = [part.header.sha256 for part in parts if len(part)]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def _join_summaries(domains: Iterable[str], summaries: Iterable[DomainSummary]) -> list[DomainSummary]:
    """Add up what tasks counted; domains that have documents come first, in their order."""
    found: dict[str, DomainSummary | None] = dict.fromkeys(domains)
    for one in summaries:
        if (so_far := found.get(one.domain)) is not None:
            counts = {
                name: getattr(so_far, name) + getattr(one, name)
                for name in ("documents", "tokens", "bad_records", "short_documents", "short_tokens")
            }
            one = DomainSummary(one.domain, longest=max(so_far.longest, one.longest), **counts)
        found[one.domain] = one
    return [one for one in found.values() if one is not None]
