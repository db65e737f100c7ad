"""A tokenised corpus on disk: flat files of tokens, read through memory maps.

`tokens-00000.bin` and so on: documents one after another, uint16 where the vocabulary allows it and else int32. No
document is in two of them. `targets-00000.bin` and so on: a byte for each token, 1 where it is a target, in a corpus
of which some documents have answers; or float32, what each target's loss counts, where some have weights.
`offsets.npy` int64 [documents + 1] · `domains.npy` int32 [documents] · `hashes.npy` uint64 [documents], of each
document's tokens · `repeats.npy` uint16 [documents], how often each is taken, under `data.mixture` and
`data.remove_duplicates` · `bad_records.txt` a line each
`store.json` holds names, counts, the fingerprint, and size and digest of each of the others.

`torchtrain.data.writer` writes stores.
"""

import hashlib
import itertools
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import FileEntry, entry_of, read_file

OFFSETS, DOMAINS, HASHES, REPEATS, BAD_RECORDS, HEADER = (
    "offsets.npy",
    "domains.npy",
    "hashes.npy",
    "repeats.npy",
    "bad_records.txt",
    "store.json",
)
_MOST_HEADER_BYTES = 1 << 26
TOKEN_TYPES = {2: np.uint16, 4: np.int32}  # by bytes of a token
_FIX = "if it lies in data.cache, delete the folder and it is made again"


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
    special_records: int


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
    sha256: str  # of the tokens as int32, as hex; of more than one shard, of their digests
    domains: list[str]
    largest_token: Annotated[int, Field(ge=-1, lt=2**31)]
    summaries: list[DomainSummary]
    sources: list[SourceCount]
    files: dict[str, FileEntry]  # size and digest of each file, by name
    token_bytes: Annotated[int, Field(ge=2, le=4, multiple_of=2)]
    shards: list[ShardSize]
    has_targets: bool = False  # a file of targets beside each shard's tokens
    has_weights: bool = False  # it holds their weights
    tokenizer: str | None = None  # its digest; None in a run's cache, where the fingerprint holds it
    made_of: dict[str, Any] | None = None  # what the tokens depend on, as JSON; None as above
    mixture: dict[str, Any] | None = None  # the settings by which `repeats.npy` was made
    duplicates_removed: bool = False  # `repeats.npy` is 0 for them

    @property
    def target_type(self) -> type[np.generic]:
        """Of an entry of a file of targets."""
        return np.float32 if self.has_weights else np.bool_

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
        if digest != _digest(content):
            raise ValueError("is not as it was written (its SHA-256 differs)")
        return header


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokenised documents that can be packed: in memory, or mapped from a store."""

    shards: Sequence[np.ndarray]  # uint16 or int32 [tokens of the shard]
    offsets: np.ndarray  # int64 [documents + 1], over all shards
    document_domains: np.ndarray  # int32 [documents], an index into `domains`
    domains: list[str]
    sizes: Sequence[ShardSize]
    hashes: np.ndarray | None = None  # uint64 [documents]; None: computed when asked for
    repeats: np.ndarray | None = None  # uint16 [documents], how often each is taken; None: once
    targets: Sequence[np.ndarray] | None = None  # bool or float32 weights [tokens of the shard]; None: all are targets

    @classmethod
    def of(
        cls,
        tokens: Sequence[np.ndarray],
        document_domains: Sequence[int],
        domains: list[str],
        targets: Sequence[np.ndarray] | None = None,
    ) -> "Documents":
        """Return documents in memory.

        tokens: int [tokens of the document] of each document, none of them empty.
        document_domains: of each document, an index into `domains`.
        targets: bool [tokens of the document] of each document; None: every token is a target.
        """
        offsets = np.cumsum([0, *map(len, tokens)], dtype=np.int64)
        joined = np.concatenate(tokens).astype(np.int32) if len(tokens) else np.zeros(0, dtype=np.int32)
        sizes = [ShardSize("", len(tokens), len(joined))]
        held = None if targets is None else [np.concatenate(targets)]
        of_document = np.asarray(document_domains, dtype=np.int32)
        return Documents([joined], offsets, of_document, domains, sizes, targets=held)

    def __len__(self) -> int:
        return len(self.document_domains)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    @cached_property
    def groups(self) -> np.ndarray:
        """Which text each document holds, int64 [documents]: the same number for documents of the same tokens."""
        return np.unique(self.content_hashes, return_inverse=True)[1].reshape(-1)

    @property
    def kept(self) -> np.ndarray:
        """Which documents there are to choose from, bool [documents]: here all."""
        return np.ones(len(self), dtype=bool)

    @cached_property
    def content_hashes(self) -> np.ndarray:
        """64 bits of each document's content, uint64 [documents]; computed if they were not kept."""
        if self.hashes is not None:
            return self.hashes
        return np.fromiter((hash_tokens(self.document(i)) for i in range(len(self))), dtype=np.uint64, count=len(self))

    @cached_property
    def copies(self) -> int:
        """Documents that hold the text of an earlier one."""
        return len(self) - len(np.unique(self.content_hashes))

    @property
    def largest_token(self) -> int:
        """The largest token id; -1 where there is no token."""
        return max((int(shard.max()) for shard in self.shards if len(shard)), default=-1)

    @property
    def token_count(self) -> int:
        """Tokens of all documents."""
        return int(self.offsets[-1])

    @cached_property
    def _first_tokens(self) -> list[int]:
        return [0, *itertools.accumulate(size.tokens for size in self.sizes)][:-1] or [0]

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document, int32; of an int32 store a view of the map, nothing copied."""
        return self.part(index, 0, int(self.offsets[index + 1] - self.offsets[index])).astype(np.int32, copy=False)

    def part(self, index: int, start: int, stop: int) -> np.ndarray:
        """Return tokens start..stop (excluded) of one document, as they are stored: a view of the map."""
        return self._part_of(self.shards, index, start, stop)

    def targets_of(self, index: int, start: int, stop: int) -> np.ndarray | None:
        """Return which tokens start..stop (excluded) of one document are targets, bool or float32; None: all."""
        return None if self.targets is None else self._part_of(self.targets, index, start, stop)

    def _part_of(self, shards: Sequence[np.ndarray], index: int, start: int, stop: int) -> np.ndarray:
        begins = int(self.offsets[index])
        shard = bisect_right(self._first_tokens, begins) - 1
        begins -= self._first_tokens[shard]
        return shards[shard][begins + start : begins + stop]


@dataclass(frozen=True, eq=False)
class TokenStore(Documents):
    """The tokens of a corpus, read-only. Pickles as its folder, so that worker processes map the same file."""

    folder: Path = Path()
    header: StoreHeader = None  # type: ignore[assignment] - `open` gives it

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Map a finished store. Arrays are checked by their digests, tokens by their size; `verify` reads all. Raises
        UserError: there is no finished store in the folder, or a file is not what was written.
        """
        folder = Path(folder)
        try:
            header = StoreHeader.parse(read_file(folder / HEADER, _MOST_HEADER_BYTES))
        except FileNotFoundError:
            raise UserError(f"{quoted(folder)} holds no finished token store ({HEADER} is missing); {_FIX}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise _damage_error(folder, HEADER, f"{place} {error.errors()[0]['msg']}") from None
        except OSError as error:
            raise _damage_error(folder, HEADER, disk_fault(error)) from None
        except (ValueError, RecursionError) as error:
            raise _damage_error(folder, HEADER, one_line(error)[:300]) from None
        arrays = {}
        _check_header(folder, header)
        for name, entry in header.files.items():
            is_array = name.endswith(".npy")
            _check_file(folder, name, entry, whole=is_array)
            if is_array:
                try:
                    arrays[name] = np.asarray(np.load(folder / name, mmap_mode="r"))
                except (ValueError, OSError, EOFError) as error:
                    raise _damage_error(folder, name, one_line(error)[:300]) from None
        _check_arrays(folder, header, arrays)
        return cls(
            shards=_Maps([folder / of.file for of in header.shards], TOKEN_TYPES[header.token_bytes]),
            offsets=arrays[OFFSETS],
            document_domains=arrays[DOMAINS],
            domains=header.domains,
            sizes=header.shards,
            hashes=arrays[HASHES],
            repeats=arrays.get(REPEATS),
            targets=_Maps([folder / targets_name(of.file) for of in header.shards], header.target_type)
            if header.has_targets
            else None,
            folder=folder,
            header=header,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.folder,)

    @property
    def largest_token(self) -> int:
        """The largest token id; -1 where there is no token."""
        return self.header.largest_token

    def verify(self) -> None:
        """Read every file and check its digest. Raises UserError: one is not what was written; names it."""
        for name, entry in self.header.files.items():
            _check_file(self.folder, name, entry, whole=True)
        if super().largest_token != self.header.largest_token:
            raise _damage_error(self.folder, HEADER, f"largest_token is not {self.header.largest_token}")

    @cached_property
    def kept(self) -> np.ndarray:
        """Which documents are there to choose from, bool [documents]: all but the duplicates that were removed."""
        return find_firsts(self.content_hashes) if self.header.duplicates_removed else super().kept

    @property
    def bad_records(self) -> Path:
        """The file that names every record that gave no document, a line `place: reason` each, in reading order."""
        return self.folder / BAD_RECORDS


def _damage_error(folder: Path, name: str, reason: str) -> UserError:
    return UserError(f"token store {quoted(folder)} is damaged ({name}: {reason}); {_FIX}")


def _check_header(folder: Path, header: StoreHeader) -> None:
    """Refuse a header that does not fit itself: a digest shows that nothing changed, not that it was right."""
    names = [shard.file for shard in header.shards]
    counted = {shard.file: shard.tokens * header.token_bytes for shard in header.shards}
    if header.has_targets:
        size = np.dtype(header.target_type).itemsize
        counted |= {targets_name(shard.file): shard.tokens * size for shard in header.shards}
    chosen = {REPEATS} if header.mixture is not None or header.duplicates_removed else set()
    wanted = {OFFSETS, DOMAINS, HASHES, BAD_RECORDS, *counted, *chosen}
    if stray := wanted.symmetric_difference(header.files.keys()):
        raise _damage_error(folder, HEADER, f"{quoted(min(stray))} is in one of shards and files alone")
    if len({*names}) < len(names) or any(not re.fullmatch(r"tokens-\d{5,}\.bin", name) for name in names):
        raise _damage_error(folder, HEADER, "shards have names that are not their own")
    if len({*header.domains}) < len(header.domains):
        raise _damage_error(folder, HEADER, "domains has a name twice")
    if any(shard.documents < 0 for shard in header.shards):
        raise _damage_error(folder, HEADER, "shards has fewer than 0 documents")
    for name, size in counted.items():
        if header.files[name].bytes != size:
            raise _damage_error(
                folder, name, f"its tokens need {size:,} bytes, and files says {header.files[name].bytes:,}"
            )


def _check_arrays(folder: Path, header: StoreHeader, arrays: dict[str, np.ndarray]) -> None:
    documents = list(itertools.accumulate((shard.documents for shard in header.shards), initial=0))
    tokens = list(itertools.accumulate((shard.tokens for shard in header.shards), initial=0))
    n = documents[-1]
    wanted = {OFFSETS: (np.int64, n + 1), DOMAINS: (np.int32, n), HASHES: (np.uint64, n), REPEATS: (np.uint16, n)}
    for name, array in arrays.items():
        kind, size = wanted[name]
        if array.dtype != kind or array.shape != (size,):
            held = f"{array.dtype} {list(array.shape)}"
            raise _damage_error(folder, name, f"is {held}, and {n:,} documents need {kind.__name__} [{size}]")
    offsets, domains = arrays[OFFSETS], arrays[DOMAINS]
    if offsets[documents].tolist() != tokens or (offsets[1:] <= offsets[:-1]).any():
        raise _damage_error(folder, OFFSETS, "documents do not follow one another to the ends of the shards")
    if n and not 0 <= domains.min() <= domains.max() < len(header.domains):
        raise _damage_error(folder, DOMAINS, f"a domain is not one of {len(header.domains)}")


def _check_file(folder: Path, name: str, entry: FileEntry, whole: bool) -> None:
    path = folder / name
    try:
        if not path.exists():
            reason = "is missing"
        elif not path.is_file() or (size := path.stat().st_size) != entry.bytes:
            held = f"{size:,} bytes" if path.is_file() else "not a regular file"
            reason = f"is cut off or overwritten ({held}; {entry.bytes:,} bytes were written)"
        elif whole and entry_of(path) != entry:
            reason = f"its content has changed, its SHA-256 is not that of {HEADER}"
        else:
            return
    except OSError as error:
        reason = disk_fault(error)
    raise _damage_error(folder, name, reason)


class _Maps(Sequence[np.ndarray]):
    """Flat files, each mapped when it is first read."""

    def __init__(self, paths: list[Path], kind: type[np.generic]) -> None:
        self._paths, self._type = paths, kind
        self._maps: list[np.ndarray | None] = [None] * len(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: Any) -> Any:
        if self._maps[index] is None:
            path = self._paths[index]
            # A task that found no document leaves an empty file, which cannot be mapped. A plain array, which is as
            # lazy: each slice of a memmap is another memmap, at some microseconds.
            tokens = np.memmap(path, self._type, mode="r") if path.stat().st_size else np.empty(0, self._type)
            self._maps[index] = np.asarray(tokens)
        return self._maps[index]


def targets_name(shard: str) -> str:
    """Return the name of the file of targets that belongs to a shard's file of tokens."""
    return shard.replace("tokens-", "targets-")


def find_firsts(hashes: np.ndarray) -> np.ndarray:
    """Return whether each document is the first with its hash, bool [documents]."""
    first = np.zeros(len(hashes), dtype=bool)
    first[np.unique(hashes, return_index=True)[1]] = True
    return first


def hash_tokens(tokens: np.ndarray) -> int:
    """Return 64 bits of a document's int32 tokens. Of 10^8 documents two share a hash with odds of 1 in 3,700."""
    return int.from_bytes(hashlib.blake2b(tokens.tobytes(), digest_size=8).digest(), "little")
