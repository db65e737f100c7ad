"""Records in, a shard out: what every task does, in a run's own process or in a cluster's."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torchtrain.config import DataConfig, Source
from torchtrain.data.corpus import BadRecord, Document, source_name
from torchtrain.data.encode import BATCH_CHARACTERS, Encoder
from torchtrain.data.selection import Signer
from torchtrain.data.store import SourceCount
from torchtrain.data.writer import StoreWriter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


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


class Tokeniser:
    """Tokenises records of a corpus into a store.

    Args:
        data: the settings.
        tokenizer: a fast tokenizer.
    """

    def __init__(self, data: DataConfig, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._data, self._encoder = data, Encoder(tokenizer, data.special_tokens)
        appended = [tokenizer.eos_token_id] if data.append_eos and tokenizer.eos_token_id is not None else []
        self._eos = np.array(appended, dtype=np.int32)
        self._signer = Signer() if data.near_duplicates else None

    def add(
        self,
        source: Source,
        records: Iterable[Document | BadRecord],
        writer: StoreWriter,
        report: Callable[[PreparationProgress], None] = lambda progress: None,
    ) -> SourceCount:
        """Tokenise what is read of a source into a store.

        Args:
            source: where the records are from.
            records: all of it or a part.
            writer: the store's.
            report: called when it begins and after each full batch.

        Returns:
            What was read.

        Raises:
            UserError: as `torchtrain.data.corpus.read`.
            OSError: a write failed.
        """
        number, bad, first_bad, special = 0, 0, "", 0
        batch: list[Document] = []
        characters = 0

        def tell() -> None:
            state = f"tokenising {source_name(source)}"
            report(PreparationProgress(state, writer.documents, writer.tokens, writer.bad_records))

        tell()
        for record in records:
            number += 1
            if isinstance(record, Document) and self._encoder.too_long(record.text):
                record = BadRecord(
                    record.where or f"record {number}",
                    f"{len(record.text):,} characters without a place to cut",
                    record.domain,
                )
            if isinstance(record, BadRecord):
                bad += 1
                first_bad = first_bad or str(record)
                writer.skip_bad(record.domain, str(record))
                continue
            special += self._encoder.looks_special(record.text)
            batch.append(record)
            characters += len(record.text)
            if characters >= BATCH_CHARACTERS:
                self._add_batch(batch, writer)
                batch, characters = [], 0
                tell()
        if batch:
            self._add_batch(batch, writer)
        return SourceCount(source_name(source), number, bad, first_bad, special)

    def _add_batch(self, batch: Sequence[Document], writer: StoreWriter) -> None:
        for record, ids in zip(batch, self._encoder.encode([record.text for record in batch]), strict=True):
            if len(ids) < self._data.min_tokens:
                writer.skip_short(record.domain, len(ids))
            else:
                signature = None if self._signer is None else self._signer.sign(record.text)
                writer.add(record.domain, np.append(ids, self._eos), signature)


def token_bytes_of(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the bytes in which every token of a vocabulary can be stored: 2 where all ids are below 65,536, else 4."""
    return 2 if max(tokenizer.get_vocab().values(), default=0) < 1 << 16 else 4
