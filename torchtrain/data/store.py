"""A tokenised corpus on disk: one flat file of tokens, read through a memory map.

`tokens.bin` int32, documents one after another · `offsets.npy` int64 [documents + 1] · `domains.npy` int32 [documents]
`hashes.npy` uint64 [documents], of each document's tokens · `bad_records.txt` one line each
`store.json` names, counts, the fingerprint, and size and digest of each of the others.

Stores made before `hashes.npy` and the digests are read as well: of them only the tokens have a digest, and hashes are
computed.
"""

import hashlib
import io
import json
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import FileEntry, entry_of, read_file, sync, write_file

TOKENS, OFFSETS, DOMAINS, HASHES, BAD_RECORDS, HEADER = (
    "tokens.bin",
    "offsets.npy",
    "domains.npy",
    "hashes.npy",
    "bad_records.txt",
    "store.json",
)
_MOST_HEADER_BYTES = 1 << 26
_ANEW = "if it lies in data.cache, delete the folder and it is made anew"


@dataclass(frozen=True)
class DomainSummary:
    """What one domain gave: documents kept and their tokens, and what was left out."""

    domain: str
    documents: int
    tokens: int
    longest: int
    bad_records: int
    short_documents: int
    short_tokens: int


@dataclass(frozen=True)
class SourceCount:
    """Records of one source: how many there were, how many bad, the first bad one, how many hold special tokens."""

    source: str
    records: int
    bad_records: int
    first_bad: str
    special_records: int | None = None  # None: the store was made before they were counted


class _Header(BaseModel):
    """What `store.json` holds."""

    model_config = ConfigDict(strict=True)

    fingerprint: str
    sha256: str
    domains: list[str]
    largest_token: int
    summaries: list[DomainSummary]
    sources: list[SourceCount]
    files: dict[str, FileEntry] | None = None  # by name; None in an older store

    def dump(self) -> bytes:
        """Return it as JSON that ends with a digest of itself."""
        content = self.model_dump(mode="json")
        return json.dumps(content | {"digest": _digest(content)}, indent=1).encode() + b"\n"

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Read it. Raises ValueError, ValidationError, RecursionError."""
        content = json.loads(text)
        digest = content.pop("digest", None) if isinstance(content, dict) else None
        header = cls.model_validate_json(json.dumps(content))
        if digest is None and header.files is None:
            return header
        if digest != _digest(content):
            raise ValueError("is not as it was written (its SHA-256 differs)")
        return header


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class TokenStore:
    """The tokens of a corpus, read-only. Pickles as its folder, so that worker processes map the same file."""

    folder: Path
    tokens: np.ndarray  # int32 [all tokens]
    offsets: np.ndarray  # int64 [documents + 1]
    document_domains: np.ndarray  # int32 [documents], an index into `domains`
    domains: list[str]
    fingerprint: str
    sha256: str  # of the tokens, as hex
    largest_token: int
    summaries: list[DomainSummary]
    sources: list[SourceCount]
    files: dict[str, FileEntry] | None = None  # size and digest of each; None in a store made before they were kept
    hashes: np.ndarray | None = None  # uint64 [documents]; None in such a store

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Map a finished store. Sizes and bounds are checked, in milliseconds; `verify` reads every byte.

        Raises:
            UserError: there is no finished store in the folder, or its files do not fit together.
        """
        folder = Path(folder)
        name = HEADER
        try:
            header = _Header.parse(read_file(folder / name, _MOST_HEADER_BYTES))
            for name, entry in (header.files or {}).items():
                _check_size(folder / name, entry)
            name = TOKENS
            tokens = _tokens(folder / name)
            name = OFFSETS
            offsets = _array(folder / name, np.int64)
            _check_offsets(offsets, len(tokens))
            documents = len(offsets) - 1
            name = DOMAINS
            document_domains = _array(folder / name, np.int32)
            _check_domains(document_domains, documents, len(header.domains))
            name = HASHES
            hashes = _array(folder / name, np.uint64) if name in (header.files or {}) else None
            if hashes is not None and len(hashes) != documents:
                raise ValueError(f"its sizes differ: {len(hashes)} hashes, {documents} documents")
        except FileNotFoundError:
            raise UserError(f"{quoted(folder)} holds no finished token store ({name} is missing); {_ANEW}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise _damage_error(folder, f"{HEADER}: {place} {error.errors()[0]['msg']}") from None
        except OSError as error:
            raise _damage_error(folder, f"{name}: {disk_fault(error)}") from None
        except (ValueError, RecursionError) as error:
            raise _damage_error(folder, f"{name}: {one_line(error)[:300]}") from None
        arrays = {"tokens": tokens, "offsets": offsets, "document_domains": document_domains, "hashes": hashes}
        return cls(folder=folder, **arrays, **dict(header))

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.folder,)

    def __len__(self) -> int:
        return len(self.document_domains)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    @cached_property
    def groups(self) -> np.ndarray:
        """Which text each document holds, int64 [documents]: the same number for documents of the same tokens."""
        hashes = _hashes(self) if self.hashes is None else self.hashes
        return np.unique(hashes, return_inverse=True)[1].reshape(-1)

    @property
    def copies(self) -> int:
        """Documents that hold the text of an earlier one."""
        return len(self) - int(self.groups.max(initial=-1)) - 1

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document: an int32 view of the map, nothing copied."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def verify(self) -> None:
        """Read every file that has a digest, and check it.

        Raises:
            UserError: one is not what was written; names it.
        """
        for name, entry in self.digests.items():
            try:
                _check_size(self.folder / name, entry)
                found = entry_of(self.folder / name)
            except OSError as error:
                raise _damage_error(self.folder, f"{name}: {disk_fault(error)}") from None
            except ValueError as error:
                raise _damage_error(self.folder, f"{name}: {error}") from None
            if found != entry:
                raise _damage_error(
                    self.folder, f"{name}: its content has changed, its SHA-256 is not that of {HEADER}"
                )

    @property
    def digests(self) -> dict[str, FileEntry]:
        """Size and digest of each file that has one: of an older store, only of the tokens."""
        return self.files or {TOKENS: FileEntry(bytes=4 * len(self.tokens), sha256=self.sha256)}

    def verify_in_background(self) -> Callable[[], None]:
        """Begin `verify` and return what waits for it, and raises what it raises."""
        failure: list[BaseException] = []

        def work() -> None:
            try:
                self.verify()
            except BaseException as error:
                failure.append(error)

        # A daemon: nobody who interrupts the program waits for a hundred gigabytes.
        thread = threading.Thread(target=work, name="verify-tokens", daemon=True)
        thread.start()

        def wait() -> None:
            thread.join()
            if failure:
                raise failure[0]

        return wait

    @property
    def bad_records(self) -> Path:
        """The file that names every record that gave no document, a line `place: reason` each, in reading order."""
        return self.folder / BAD_RECORDS


def _damage_error(folder: Path, reason: str) -> UserError:
    return UserError(f"token store {quoted(folder)} is damaged ({reason}); {_ANEW}")


def _check_size(path: Path, entry: FileEntry) -> None:
    if not path.exists():
        raise FileNotFoundError(2, "no such file", str(path))
    if not path.is_file() or (size := path.stat().st_size) != entry.bytes:
        held = f"{size:,} bytes" if path.is_file() else "not a regular file"
        raise ValueError(f"is cut off or overwritten ({held}; {entry.bytes:,} bytes were written)")


def _array(path: Path, dtype: type) -> np.ndarray:
    """Map an array of one dimension from a .npy file."""
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    try:
        found = np.lib.format.open_memmap(path, mode="r")
    except (ValueError, OSError):
        raise
    except (
        Exception
    ) as error:  # numpy reads the header as Python source, and Python's parser has many words for nonsense
        raise ValueError(f"no .npy file ({error})") from None
    if found.ndim != 1 or found.dtype != dtype:
        raise ValueError(f"holds {found.dtype} of {found.ndim} dimensions, not {np.dtype(dtype)} of one")
    return found


def _tokens(path: Path) -> np.ndarray:
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    return np.memmap(path, dtype=np.int32, mode="r")


def _check_offsets(offsets: np.ndarray, tokens: int) -> None:
    """Check that every document lies inside. Raises ValueError."""
    if len(offsets) == 0 or offsets[0] != 0 or not (offsets[1:] > offsets[:-1]).all():
        raise ValueError("offsets that do not rise from 0")
    if offsets[-1] != tokens:
        raise ValueError(f"its sizes differ: documents of {offsets[-1]} tokens, and there are {tokens}")


def _check_domains(document_domains: np.ndarray, documents: int, domains: int) -> None:
    """Check that every document has one that there is. Raises ValueError."""
    if len(document_domains) != documents:
        raise ValueError(f"its sizes differ: {len(document_domains)} documents, and there are {documents}")
    if document_domains.min(initial=0) < 0 or document_domains.max(initial=-1) >= domains:
        raise ValueError(f"its sizes differ: a document's domain is none of the {domains}")


def _hash(tokens: np.ndarray) -> int:
    """Return 64 bits of a document's content.

    That two of a hundred million differ in content only has odds of 1 in 3,000.
    """
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def _hashes(store: TokenStore) -> np.ndarray:
    """Compute what `hashes.npy` of an older store would hold."""
    return np.fromiter((_hash(store.document(i)) for i in range(len(store))), dtype=np.uint64, count=len(store))


class StoreWriter:
    """Writes a store into an empty folder of its own; the store exists once `finish` has returned.

    No write is taken for done: each is checked, all are flushed to the disk, and sizes are read back. OSError says what
    failed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets = array("q", [0])
        self.document_domains = array("i")
        self.hashes = array("Q")
        self.domain_ids: dict[str, int] = {}
        self.largest_token = -1
        self.bad_records = 0
        self._skipped: dict[str, dict[str, int]] = {}
        self._tokens = _Growing(folder / TOKENS)
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

    def add(self, domain: str, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document."""
        tokens = np.asarray(ids, dtype=np.int32)
        # Not `tofile`: it goes past Python's buffer by C's, and the last block's failure is nobody's.
        self._tokens.write(tokens.tobytes())
        self.hashes.append(_hash(tokens))
        self.offsets.append(self.offsets[-1] + len(tokens))
        self.document_domains.append(self.domain_ids.setdefault(domain, len(self.domain_ids)))
        self.largest_token = max(self.largest_token, int(tokens.max()))

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

    def finish(self, fingerprint: str, sources: list[SourceCount]) -> None:
        """Write what completes the store and flush all of it to the disk."""
        offsets = np.array(self.offsets, dtype=np.int64)
        document_domains = np.array(self.document_domains, dtype=np.int32)
        files = {
            TOKENS: self._tokens.finish(),
            BAD_RECORDS: self._bad.finish(),
            OFFSETS: _write_array(self.folder / OFFSETS, offsets),
            DOMAINS: _write_array(self.folder / DOMAINS, document_domains),
            HASHES: _write_array(self.folder / HASHES, np.array(self.hashes, dtype=np.uint64)),
        }
        header = _Header(
            fingerprint=fingerprint,
            sha256=files[TOKENS].sha256,
            domains=list(self.domain_ids),
            largest_token=self.largest_token,
            summaries=self._summaries(np.diff(offsets), document_domains),
            sources=sources,
            files=files,
        )
        _finish(self.folder, header)

    def _counts(self, domain: str) -> dict[str, int]:
        return self._skipped.setdefault(domain, {"bad_records": 0, "short_documents": 0, "short_tokens": 0})

    def _summaries(self, lengths: np.ndarray, document_domains: np.ndarray) -> list[DomainSummary]:
        summaries = []
        for domain in dict.fromkeys([*self.domain_ids, *self._skipped]):
            own = lengths[document_domains == self.domain_ids.get(domain, -1)]
            kept = {"documents": len(own), "tokens": int(own.sum()), "longest": int(own.max(initial=0))}
            summaries.append(DomainSummary(domain, **kept, **self._counts(domain)))
        return summaries


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


def _finish(folder: Path, header: _Header) -> None:
    """Write the header of a store whose files are written, and read all sizes back."""
    files = dict(header.files or {})
    files[HEADER] = write_file(folder / HEADER, header.dump())
    for name, entry in files.items():
        if (size := (folder / name).stat().st_size) != entry.bytes:
            raise OSError(5, f"{size:,} bytes are on the disk and {entry.bytes:,} were written", str(folder / name))
    sync(folder)


def take_over(store: TokenStore, folder: Path, fingerprint: str) -> None:
    """Make, in an empty folder, another store under a new fingerprint: the same files, linked where the disk can.

    An older store gets hashes and digests by it.

    Raises:
        OSError: it cannot be written.
    """
    files = {}
    for name in (TOKENS, OFFSETS, DOMAINS, BAD_RECORDS):
        try:
            os.link(store.folder / name, folder / name)
        except OSError:
            _copy(store.folder / name, folder / name)
        files[name] = store.digests.get(name) or entry_of(folder / name)
    files[HASHES] = _write_array(folder / HASHES, _hashes(store) if store.hashes is None else store.hashes)
    header = {name: getattr(store, name) for name in ("sha256", "domains", "largest_token", "summaries", "sources")}
    _finish(folder, _Header(**header, fingerprint=fingerprint, files=files))


def _copy(source: Path, target: Path) -> None:
    copy = _Growing(target)
    try:
        with source.open("rb") as file:
            while block := file.read(1 << 22):
                copy.write(block)
        copy.finish()
    finally:
        copy.leave()
