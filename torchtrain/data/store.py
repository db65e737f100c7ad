"""A tokenised corpus on disk: flat files of tokens, read through memory maps.

`tokens.bin`, documents one after another, uint16 where the vocabulary allows it and else int32; of a store in shards
`tokens-00000.bin` and so on, and no document lies in two of them.
`offsets.npy` int64 [documents + 1] · `domains.npy` int32 [documents] · `hashes.npy` uint64 [documents], of each
document's tokens · `signatures.npy` uint64 [documents * 14], under `data.near_duplicates` · `repeats.npy` uint16
[documents], under a mixture · `bad_records.txt` one line each
`store.json` names, counts, the fingerprint, and size and digest of each of the others.

Stores made before `hashes.npy` and the digests are read as well: of them only the tokens have a digest, and hashes are
computed. `torchtrain.data.writer` writes.
"""

import hashlib
import itertools
import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import FileEntry, entry_of, read_file
from torchtrain.data.near import BUCKETS, near_groups

TOKENS, OFFSETS, DOMAINS, HASHES, SIGNATURES, REPEATS, BAD_RECORDS, HEADER = (
    "tokens.bin",
    "offsets.npy",
    "domains.npy",
    "hashes.npy",
    "signatures.npy",
    "repeats.npy",
    "bad_records.txt",
    "store.json",
)
_MOST_HEADER_BYTES = 1 << 26
TOKEN_TYPES = {2: np.uint16, 4: np.int32}  # by bytes of a token
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


@dataclass(frozen=True)
class ShardSize:
    """One shard of a store: its file, and how many documents and tokens it holds."""

    file: str
    documents: int
    tokens: int


class StoreHeader(BaseModel):
    """What `store.json` holds."""

    model_config = ConfigDict(strict=True)

    fingerprint: str
    sha256: str
    domains: list[str]
    largest_token: int
    summaries: list[DomainSummary]
    sources: list[SourceCount]
    files: dict[str, FileEntry] | None = None  # by name; None in an older store
    token_bytes: int = 4
    shards: list[ShardSize] | None = None  # None: all tokens are in one file
    tokenizer: str | None = None  # its identity; None where the fingerprint alone holds it
    made_of: dict[str, Any] | None = None  # what the tokens depend on, as JSON
    mixture: dict[str, Any] | None = None  # the settings by which `repeats.npy` was made

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
    shards: Sequence[np.ndarray]  # uint16 or int32 [tokens of the shard]
    offsets: np.ndarray  # int64 [documents + 1]
    document_domains: np.ndarray  # int32 [documents], an index into `domains`
    domains: list[str]
    fingerprint: str
    sha256: str  # of the tokens as int32, as hex; of more than one shard, of their digests
    largest_token: int
    summaries: list[DomainSummary]
    sources: list[SourceCount]
    files: dict[str, FileEntry] | None = None  # size and digest of each; None in a store made before they were kept
    hashes: np.ndarray | None = None  # uint64 [documents]; None in such a store
    signatures: np.ndarray | None = None  # uint64 [documents, 14] (`torchtrain.data.near`); None where not asked for
    repeats: np.ndarray | None = None  # uint16 [documents], how often each is taken; None without a mixture
    sizes: Sequence[ShardSize] = ()
    header: StoreHeader | None = field(default=None, repr=False)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Map a finished store. Sizes and bounds are checked, in milliseconds; `verify` reads every byte.

        Raises:
            UserError: there is no finished store in the folder, or its files do not fit together.
        """
        folder = Path(folder)
        name = HEADER
        try:
            header = StoreHeader.parse(read_file(folder / name, _MOST_HEADER_BYTES))
            for name, entry in (header.files or {}).items():
                _check_size(folder / name, entry)
            if header.shards is None:
                name = TOKENS
                shards: Sequence[np.ndarray] = [_tokens(folder / name, header.token_bytes)]
                sizes = [ShardSize(TOKENS, -1, len(shards[0]))]
            else:
                name, sizes = HEADER, header.shards
                _check_shards(sizes, header)
                shards = _Maps(folder, sizes, header.token_bytes)
            name = OFFSETS
            offsets = _array(folder / name, np.int64)
            _check_offsets(offsets, sum(size.tokens for size in sizes))
            documents = len(offsets) - 1
            if header.shards is None:
                sizes = [ShardSize(TOKENS, documents, sizes[0].tokens)]
            _check_ends(offsets, sizes)
            name = DOMAINS
            document_domains = _array(folder / name, np.int32)
            _check_domains(document_domains, documents, len(header.domains))
            found: dict[str, np.ndarray | None] = {}
            for name, dtype, each in (
                (HASHES, np.uint64, 1),
                (SIGNATURES, np.uint64, BUCKETS),
                (REPEATS, np.uint16, 1),
            ):
                one = found[name] = _array(folder / name, dtype) if name in (header.files or {}) else None
                if one is not None and len(one) != documents * each:
                    raise ValueError(f"its sizes differ: {len(one)} of them, {documents} documents")
            signatures = found[SIGNATURES]
        except FileNotFoundError:
            raise UserError(f"{quoted(folder)} holds no finished token store ({name} is missing); {_ANEW}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise _damage_error(folder, f"{HEADER}: {place} {error.errors()[0]['msg']}") from None
        except OSError as error:
            raise _damage_error(folder, f"{name}: {disk_fault(error)}") from None
        except (ValueError, RecursionError) as error:
            raise _damage_error(folder, f"{name}: {one_line(error)[:300]}") from None
        return cls(
            folder=folder,
            shards=shards,
            offsets=offsets,
            document_domains=document_domains,
            domains=header.domains,
            fingerprint=header.fingerprint,
            sha256=header.sha256,
            largest_token=header.largest_token,
            summaries=header.summaries,
            sources=header.sources,
            files=header.files,
            hashes=found[HASHES],
            signatures=None if signatures is None else signatures.reshape(-1, BUCKETS),
            repeats=found[REPEATS],
            sizes=sizes,
            header=header,
        )

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
        """Which text each document holds, int64 [documents]: the same number for documents of the same tokens, and
        under `data.near_duplicates` for near duplicates.
        """
        same = np.unique(self.content_hashes, return_inverse=True)[1].reshape(-1)
        return same if self.signatures is None else near_groups(self.signatures, same)

    @cached_property
    def content_hashes(self) -> np.ndarray:
        """64 bits of each document's content, uint64 [documents]; of an older store computed."""
        return hashes_of(self) if self.hashes is None else self.hashes

    @cached_property
    def copies(self) -> int:
        """Documents that hold the text of an earlier one."""
        return len(self) - len(np.unique(self.content_hashes))

    @property
    def near_copies(self) -> int:
        """Documents that hold nearly the text of an earlier one, copies not counted; 0 where nobody looked."""
        return len(self) - int(self.groups.max(initial=-1)) - 1 - self.copies

    @property
    def token_count(self) -> int:
        """Tokens of all documents."""
        return int(self.offsets[-1])

    @cached_property
    def _first_tokens(self) -> list[int]:
        """The number of each shard's first token among all tokens."""
        return [0, *itertools.accumulate(size.tokens for size in self.sizes)][:-1] or [0]

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, int32; of an int32 store a view of the map, nothing copied."""
        return self.part(index, 0, int(self.offsets[index + 1] - self.offsets[index])).astype(np.int32, copy=False)

    def part(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens start..stop (excluded) of one document, as they are stored: a view of the map."""
        begins = int(self.offsets[index])
        shard = bisect_right(self._first_tokens, begins) - 1
        begins -= self._first_tokens[shard]
        return self.shards[shard][begins + start : begins + stop]

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
        return self.files or {TOKENS: FileEntry(bytes=4 * self.token_count, sha256=self.sha256)}

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
    return np.asarray(found)


def _tokens(path: Path, token_bytes: int) -> np.ndarray:
    if path.exists() and not path.is_file():
        raise ValueError("not a regular file")
    if token_bytes not in TOKEN_TYPES:
        raise ValueError(f"holds tokens of {token_bytes} bytes")
    if path.stat().st_size == 0:  # of a task that found no document; an empty file cannot be mapped
        return np.empty(0, dtype=TOKEN_TYPES[token_bytes])
    # As a plain array, which is as lazy: each slice of a memmap is another memmap, at some microseconds.
    return np.asarray(np.memmap(path, dtype=TOKEN_TYPES[token_bytes], mode="r"))


class _Maps(Sequence[np.ndarray]):
    """The shards of a store, each mapped when it is first read."""

    def __init__(self, folder: Path, sizes: Sequence[ShardSize], token_bytes: int) -> None:
        self._folder, self._sizes, self._token_bytes = folder, sizes, token_bytes
        self._maps: list[np.ndarray | None] = [None] * len(sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        found = self._maps[index]
        if found is None:
            found = self._maps[index] = _tokens(self._folder / self._sizes[index].file, self._token_bytes)
        return found


def _check_shards(sizes: Sequence[ShardSize], header: StoreHeader) -> None:
    """Check that every shard has its file, of its size, and documents. Raises ValueError."""
    for size in sizes:
        entry = (header.files or {}).get(size.file)
        if size.documents < 1 or entry is None or entry.bytes != size.tokens * header.token_bytes:
            raise ValueError(f"its shard {size.file} is not of the size that it must be")
    if header.token_bytes not in TOKEN_TYPES or not sizes:
        raise ValueError(f"{len(sizes)} shards of tokens of {header.token_bytes} bytes")


def _check_ends(offsets: np.ndarray, sizes: Sequence[ShardSize]) -> None:
    """Check that no document lies in two shards. Raises ValueError."""
    documents, tokens = (np.cumsum([getattr(size, name) for size in sizes]) for name in ("documents", "tokens"))
    if documents[-1] != len(offsets) - 1 or (offsets[documents] != tokens).any():
        raise ValueError("its sizes differ: shards do not end where documents do")


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


def hash_of(tokens: np.ndarray) -> int:
    """Return 64 bits of a document's content, its tokens as int32.

    That two of a hundred million differ in content only has odds of 1 in 3,000.
    """
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")


def hashes_of(store: TokenStore) -> np.ndarray:
    """Compute what `hashes.npy` of an older store would hold."""
    return np.fromiter((hash_of(store.document(i)) for i in range(len(store))), dtype=np.uint64, count=len(store))
