"""A tokenised corpus on disk: one flat file of tokens, read through a memory map.

`tokens.bin` int32, documents one after another · `offsets.npy` int64 [documents + 1] · `domains.npy` int32 [documents]
`bad_records.txt` one line each · `store.json` names, counts and the fingerprint.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ValidationError

from anchorline.errors import UserError
from anchorline.files import sync

TOKENS, OFFSETS, DOMAINS, BAD_RECORDS, HEADER = (
    "tokens.bin",
    "offsets.npy",
    "domains.npy",
    "bad_records.txt",
    "store.json",
)


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
    """Records of one source: how many there were, how many bad, and the first bad one."""

    source: str
    records: int
    bad_records: int
    first_bad: str


class _Header(BaseModel):
    """What `store.json` holds."""

    fingerprint: str
    sha256: str
    domains: list[str]
    largest_token: int
    summaries: list[DomainSummary]
    sources: list[SourceCount]


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

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Map a finished store.

        Raises:
            UserError: there is no finished store in the folder, or its files do not fit together.
        """
        folder = Path(folder)
        anew = "if it lies in data.cache, delete the folder and it is made anew"
        try:
            header = _Header.model_validate_json((folder / HEADER).read_bytes())
            offsets = np.load(folder / OFFSETS, mmap_mode="r")
            document_domains = np.load(folder / DOMAINS, mmap_mode="r")
            tokens = np.memmap(folder / TOKENS, dtype=np.int32, mode="r")
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise UserError(f"{folder} holds no finished token store ({missing} is missing); {anew}") from None
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            reason = f"{HEADER}: {place} {error.errors()[0]['msg']}"
            raise UserError(f"token store {folder} is damaged ({reason}); {anew}") from None
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"token store {folder} is damaged ({error}); {anew}") from None
        if (
            len(document_domains) != len(offsets) - 1
            or offsets[-1] != len(tokens)
            or document_domains.max(initial=-1) >= len(header.domains)
        ):
            raise UserError(f"token store {folder} is damaged (its sizes differ); {anew}")
        return cls(
            folder=folder,
            tokens=tokens,
            offsets=offsets,
            document_domains=document_domains,
            **dict(header),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore.open, (self.folder,)

    def __len__(self) -> int:
        return len(self.document_domains)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64 [documents]."""
        return np.diff(self.offsets)

    def document(self, index: int) -> np.ndarray:
        """Return the tokens of one document: an int32 view of the map, nothing copied."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    @property
    def bad_records(self) -> Path:
        """The file that names every record that gave no document, a line `place: reason` each, in reading order."""
        return self.folder / BAD_RECORDS


class StoreWriter:
    """Writes a store into an empty folder of its own; the store exists once `finish` has returned."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets = array("q", [0])
        self.document_domains = array("i")
        self.domain_ids: dict[str, int] = {}
        self.largest_token = -1
        self.bad_records = 0
        self._skipped: dict[str, dict[str, int]] = {}
        self._digest = hashlib.sha256()
        self._tokens = (folder / TOKENS).open("wb")
        self._bad = (folder / BAD_RECORDS).open("w", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._tokens.close()
        self._bad.close()

    @property
    def documents(self) -> int:
        """Documents written so far."""
        return len(self.document_domains)

    @property
    def tokens(self) -> int:
        """Tokens written so far."""
        return self.offsets[-1]

    def add(self, domain: str, ids: Sequence[int]) -> None:
        """Append one document."""
        tokens = np.asarray(ids, dtype=np.int32)
        tokens.tofile(self._tokens)
        self._digest.update(tokens.tobytes())
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
        self._bad.write(line + "\n")

    def finish(self, fingerprint: str, sources: list[SourceCount]) -> None:
        """Write what completes the store and flush all of it to the disk."""
        offsets = np.array(self.offsets, dtype=np.int64)
        document_domains = np.array(self.document_domains, dtype=np.int32)
        np.save(self.folder / OFFSETS, offsets)
        np.save(self.folder / DOMAINS, document_domains)
        header = _Header(
            fingerprint=fingerprint,
            sha256=self._digest.hexdigest(),
            domains=list(self.domain_ids),
            largest_token=self.largest_token,
            summaries=self._summaries(np.diff(offsets), document_domains),
            sources=sources,
        )
        (self.folder / HEADER).write_text(header.model_dump_json(indent=2) + "\n", encoding="utf-8")
        self._tokens.flush()
        self._bad.flush()
        for path in (*self.folder.iterdir(), self.folder):
            sync(path)

    def _counts(self, domain: str) -> dict[str, int]:
        return self._skipped.setdefault(domain, {"bad_records": 0, "short_documents": 0, "short_tokens": 0})

    def _summaries(self, lengths: np.ndarray, document_domains: np.ndarray) -> list[DomainSummary]:
        summaries = []
        for domain in dict.fromkeys([*self.domain_ids, *self._skipped]):
            own = lengths[document_domains == self.domain_ids.get(domain, -1)]
            kept = {"documents": len(own), "tokens": int(own.sum()), "longest": int(own.max(initial=0))}
            summaries.append(DomainSummary(domain, **kept, **self._counts(domain)))
        return summaries
