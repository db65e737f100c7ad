"""Packed rows by number: plan an epoch, read any row, stack rows into a batch.

Legend: B batch · T tokens of a row.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from anchorline.errors import UserError
from torchtrain.config import PackConfig
from torchtrain.data.packing import INTERLEAVE, PackPlan, random_stream
from torchtrain.data.rows import SpanTokens, build_row
from torchtrain.data.store import Documents

if TYPE_CHECKING:
    import datasets


class PackedRows(Dataset[dict[str, np.ndarray]]):
    """Rows of packed documents, each reachable at once; the same for any worker, rank and order of access. Threads may
    share one.

    A map-style data set over the first epoch (`len`, `[i]`); `row_at` goes on, with a new order of documents each
    epoch.

    Args:
        store: the corpus.
        documents: int [n], which of its documents to pack.
        pack: variant, T and the rest.
        seed: of the order of documents and of the interleaving.
        anchor_ids: tokens that open every row.
        tag_ids: domain -> the tokens of its tag; {} without +tag.
        pad_id: fills the last row.
        together: rows of a step; `pack.strategy` by_length makes them alike.

    Raises:
        UserError: there are no documents, anchor and tag leave no room in a row, or `pack.last: drop` leaves no row.
    """

    def __init__(
        self,
        store: Documents,
        documents: np.ndarray,
        pack: PackConfig,
        seed: int,
        anchor_ids: Sequence[int],
        tag_ids: Mapping[int, Sequence[int]],
        pad_id: int,
        together: int = 1,
    ) -> None:
        self.store, self.documents, self.pack, self.seed = store, np.asarray(documents), pack, seed
        self.anchor_ids, self.tag_ids, self.pad_id, self._together = anchor_ids, tag_ids, pad_id, together
        if not len(self.documents):
            raise UserError("no documents to pack: lower data.held_out_share or give more data")
        tag_lengths = np.array([len(tag_ids.get(domain, ())) for domain in range(len(store.domains))], dtype=np.int64)
        self._capacity = pack.sequence_length - len(anchor_ids)
        if tag_lengths.max() >= self._capacity:
            raise UserError(
                f"pack.sequence_length {pack.sequence_length}: an anchor of {len(anchor_ids)} and a tag of "
                f"{tag_lengths.max()} tokens leave no room for a document; make rows longer"
            )
        self._overhead = tag_lengths[store.document_domains[self.documents]]
        self._tags = bool(self._overhead.any())
        self._plans: dict[int, PackPlan] = {}
        self._rows: dict[int, int] = {}
        if not len(self):
            raise UserError(
                f"pack.last 'drop' leaves no row: {self.plan(0).dropped_tokens} tokens do not fill "
                f"pack.sequence_length {pack.sequence_length}; use pad, shorter rows or more data"
            )

    def __len__(self) -> int:
        return self._rows_of(0)

    def __getitem__(self, row: int) -> dict[str, np.ndarray]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._row(0, row)

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[row] for row in range(len(self)))

    def to_datasets(self) -> "datasets.Dataset":
        """Return the rows of the first epoch as a `datasets.Dataset` in memory: a column an array, int32 [T] each."""
        import datasets

        rows = list(self)
        column = datasets.Sequence(datasets.Value("int32"), length=self.pack.sequence_length)
        columns = {name: [row[name].astype(np.int32) for row in rows] for name in rows[0]}
        return datasets.Dataset.from_dict(columns, features=datasets.Features(dict.fromkeys(columns, column)))

    def row_at(self, index: int) -> dict[str, np.ndarray]:
        """Return row `index` of the endless sequence of epochs: the five arrays, int64 [T]."""
        return self._row(*self.locate(index))

    def locate(self, index: int) -> tuple[int, int]:
        """Return (epoch, row) of a place in the endless sequence of epochs."""
        assert index >= 0
        epoch = 0
        while index >= self._rows_of(epoch):
            index -= self._rows_of(epoch)
            epoch += 1
        return epoch, index

    def plan(self, epoch: int) -> PackPlan:
        """Return the plan of an epoch, with its counts of tokens, padding and what is dropped."""
        plan = self._plans.get(epoch)
        if plan is None:
            lengths = self.store.lengths[self.documents]
            last, strategy = self.pack.last, self.pack.strategy
            before = sum(map(self._rows_of, range(epoch))) if strategy == "by_length" else 0
            plan = PackPlan(
                lengths, self._capacity, self._overhead, self.seed, epoch, last, strategy, self._together, before
            )
            # Two are kept, for batches that reach over the end of an epoch. Replaced whole: other threads read it.
            self._plans = dict([*list(self._plans.items())[-1:], (epoch, plan)])
        return plan

    def _rows_of(self, epoch: int) -> int:
        # Without tags every order gives as many rows, laid end to end; else a plan tells.
        epoch = epoch if self._tags and self.pack.strategy != "best_fit" else 0
        if epoch not in self._rows:
            self._rows[epoch] = len(self.plan(epoch))
        return self._rows[epoch]

    def _row(self, epoch: int, row: int) -> dict[str, np.ndarray]:
        spans = []
        for index, start, stop in self.plan(epoch).spans(row):
            document = int(self.documents[index])
            domain = int(self.store.document_domains[document])
            tokens = self.store.part(document, start, stop)
            spans.append(SpanTokens(tokens, domain, self.tag_ids.get(domain, ())))
        # A generator costs a tenth of a short row.
        random = random_stream(self.seed, INTERLEAVE, epoch, row) if self.pack.interleave else None
        return build_row(spans, self.pack, self.anchor_ids, self.pad_id, random)


def collate(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Stack rows of B arrays [T] into LongTensors [B, T] by the same names."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}
