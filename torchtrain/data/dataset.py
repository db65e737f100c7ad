"""From documents to batches: hold documents out, plan an epoch of packed rows, read any row, stack rows into a batch.

Legend: B batch · T tokens of a row.
"""

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex

import numpy as np
import torch
from torch.utils.data import Dataset

from anchorline.errors import UserError, quoted
from anchorline.files import read_json
from torchtrain.config import PackConfig
from torchtrain.data.encode import list_special_tokens, special_id
from torchtrain.data.packing import PackPlan
from torchtrain.data.rows import SpanTokens, build_row
from torchtrain.data.store import Documents
from torchtrain.data.streams import HELD_OUT, INTERLEAVE, WEIGHTS, random_stream
from torchtrain.data.weights import LossWeights

if TYPE_CHECKING:
    import datasets
    from transformers import PreTrainedTokenizerFast


class Split(NamedTuple):
    """Documents of both sides, int64 and sorted, and how many changed sides as copies. A mixture repeats `train`."""

    train: np.ndarray
    held_out: np.ndarray
    moved: int


def split_documents(store: Documents, held_out_share: float, seed: int) -> Split:
    """Draw each domain's held-out documents by seed, at least one where a share above 0 finds two different ones. If a
    text is then on both sides, the draw is done again by whole texts.
    """
    orders, counts = [], []
    for domain in range(len(store.domains)):
        own = np.flatnonzero(store.document_domains == domain)
        count = round(held_out_share * len(own))
        if held_out_share > 0 and len(own) > 1:
            count = max(count, 1)
        orders.append(random_stream(seed, HELD_OUT, domain).permutation(own))
        counts.append(count)
    drawn = np.zeros(len(store), dtype=bool)
    for order, count in zip(orders, counts, strict=True):
        drawn[order[:count]] = True
    held = drawn
    if store.copies and np.intersect1d(store.groups[drawn], store.groups[~drawn]).size:
        held = _split_texts(store.groups, orders, counts)
    moved = int((held != drawn).sum())
    if store.repeats is None:
        return Split(np.flatnonzero(~held), np.flatnonzero(held), moved)
    # What is held out does not depend on the mixture.
    held = held & store.kept
    train = np.repeat(np.arange(len(store)), np.where(held, 0, store.repeats))
    return Split(train, np.flatnonzero(held), moved)


def _split_texts(groups: np.ndarray, orders: list[np.ndarray], counts: list[int]) -> np.ndarray:
    """Return which documents are held out, bool [n]: whole texts that fit a domain's count, else its smallest one."""
    held = np.zeros(int(groups.max()) + 1, dtype=bool)  # by text
    passed = np.zeros_like(held)
    for order, count in zip(orders, counts, strict=True):
        texts, copies = np.unique(groups[order], return_counts=True)
        size = dict(zip(texts.tolist(), copies.tolist(), strict=True))
        room = count - sum(size[text] for text in texts[held[texts]].tolist())
        for text in groups[order].tolist():
            if room <= 0:
                break
            if not held[text] and not passed[text] and size[text] <= room:
                held[text] = True
                room -= size[text]
        if count and not held[texts].any():
            free = [text for text in texts.tolist() if not passed[text]]
            if len(texts) > 1 and free:
                held[min(free, key=lambda text: size[text])] = True
        passed[texts] |= ~held[texts]
    return held[groups]


class PackedRows(Dataset[dict[str, np.ndarray]]):
    """Rows of packed documents, each reachable at once; the same for any worker, rank and order of access. Threads may
    share one.

    A map-style data set over the first epoch (`len`, `[i]`); `row_at` goes on, with a new order of documents each
    epoch.

    documents: int [n], which of its documents to pack.
    seed: of the order of documents and of the interleaving.
    tag_ids: domain -> the tokens of its tag; {} without +tag.
    together: rows of a step; `pack.strategy` by_length makes them alike.
    Raises UserError: there are no documents, anchor and tag leave no room in a row, or `pack.last: drop` leaves no row;
        documents with answers would be cut.
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
        self.too_long = 0  # documents with answers that no row holds
        self.loss_weights: LossWeights | None = None  # set to give rows `weights`
        self._skipped = np.zeros(len(store), dtype=np.int64)  # tokens at a document's start that the anchor stands for
        self.lengths = store.lengths
        if store.targets is not None:
            self._keep_whole(tag_lengths)
        self._overhead = tag_lengths[store.document_domains[self.documents]]
        self._tags = bool(self._overhead.any())
        self._plans: dict[int, PackPlan] = {}
        self._rows: dict[int, int] = {}
        if not len(self):
            raise UserError(
                f"pack.last 'drop' leaves no row: {self.plan(0).dropped_tokens} tokens do not fill "
                f"pack.sequence_length {pack.sequence_length}; use pad, shorter rows or more data"
            )

    def _keep_whole(self, tag_lengths: np.ndarray) -> None:
        """Prepare for documents with answers: none is cut, and none repeats the anchor that it sees."""
        pack, store = self.pack, self.store
        if pack.cuts_answers:
            raise UserError(f"pack.{pack.cuts_answers}")
        if pack.base_variant.has_anchor and len(self.anchor_ids) == 1:
            opens = [store.part(i, 0, 1)[0] == self.anchor_ids[0] for i in range(len(store))]
            self._skipped = np.array(opens, dtype=np.int64) * (store.lengths > 1)
            self.lengths = store.lengths - self._skipped
        room = self._capacity - tag_lengths[store.document_domains[self.documents]]
        fits = self.lengths[self.documents] <= room
        self.too_long = int((~fits).sum())
        if self.too_long and pack.longer == "refuse":
            longest = int(self.lengths[self.documents].max())
            raise UserError(
                f"pack.sequence_length {pack.sequence_length}: {self.too_long:,} documents with answers are longer "
                f"than a row (the longest has {longest:,} tokens), and are never cut; make rows longer, or set "
                "pack.longer to drop"
            )
        self.documents = self.documents[fits]
        if not len(self.documents):
            raise UserError(
                f"pack.longer drop: leaves nothing of {self.too_long:,} documents; make pack.sequence_length longer"
            )

    def __len__(self) -> int:
        return self._rows_of(0)

    def __getitem__(self, row: SupportsIndex) -> dict[str, np.ndarray]:
        row = operator.index(row)
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

    def count(self, epochs: float) -> int:
        """Return how many rows so many epochs have; of a last one that is not whole, its share rounded up."""
        whole = math.floor(epochs)
        return sum(map(self._rows_of, range(whole))) + math.ceil((epochs - whole) * self._rows_of(whole))

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
            lengths = self.lengths[self.documents]
            last, strategy = self.pack.last, self.pack.strategy
            before = sum(map(self._rows_of, range(epoch))) if strategy == "by_length" else 0
            plan = PackPlan(
                lengths, self._capacity, self._overhead, self.seed, epoch, last, strategy, self._together, before
            )
            # Two are kept, for batches that reach over the end of an epoch. Replaced whole: other threads read it.
            self._plans = dict([*list(self._plans.items())[-1:], (epoch, plan)])
        return plan

    def _rows_of(self, epoch: int) -> int:
        # Laid end to end without tags, every order gives the same number of rows. With tags a plan counts them.
        epoch = epoch if self._tags and self.pack.strategy != "best_fit" else 0
        if epoch not in self._rows:
            self._rows[epoch] = len(self.plan(epoch))
        return self._rows[epoch]

    def _row(self, epoch: int, row: int) -> dict[str, np.ndarray]:
        # A generator costs a tenth of a short row.
        random = random_stream(self.seed, INTERLEAVE, epoch, row) if self.pack.interleave else None
        built = build_row(self.spans(row, epoch), self.pack, self.anchor_ids, self.pad_id, random)
        if self.loss_weights is None:
            return built
        return self.loss_weights.weigh(built, random_stream(self.seed, WEIGHTS, epoch, row))

    def spans(self, row: int, epoch: int = 0) -> list[SpanTokens]:
        """Return what a row of an epoch holds behind its anchor, in storage order."""
        spans = []
        for index, start, stop in self.plan(epoch).spans(row):
            document = int(self.documents[index])
            domain = int(self.store.document_domains[document])
            place = start + int(self._skipped[document]), stop + int(self._skipped[document])
            tokens, targets = self.store.part(document, *place), self.store.targets_of(document, *place)
            spans.append(SpanTokens(tokens, domain, self.tag_ids.get(domain, ()), targets))
        return spans


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """Stack rows of B arrays [T] into tensors [B, T] by the same names: int64, and `weights` float32."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}


# --- what rows take from a tokenizer ----------------------------------------------------------------------------------


def anchor_ids(tokenizer: "PreTrainedTokenizerFast", pack: PackConfig) -> list[int]:
    """Return the A tokens that open rows: `pack.anchor`, or BOS, or EOS. Raises UserError: the tokenizer lacks them."""
    if pack.anchor == "auto":
        for name in ("bos", "eos"):
            if (special := special_id(tokenizer, name)) is not None:
                return [special]
        raise UserError("pack.anchor 'auto': the tokenizer has neither BOS nor EOS; give a token id")
    ids = [pack.anchor] if isinstance(pack.anchor, int) else pack.anchor
    if not ids and pack.base_variant.has_anchor:
        raise UserError("pack.anchor []: the list is empty; give at least one token id, or auto")
    known = set(tokenizer.get_vocab().values())
    for token in ids:
        if token not in known:
            raise UserError(f"pack.anchor {token}: the tokenizer has no such token id (0..{max(known)})")
    return ids


def tag_ids(tokenizer: "PreTrainedTokenizerFast", pack: PackConfig, domains: Sequence[str]) -> dict[int, list[int]]:
    """Return a domain's (index in `domains`) tag under +tag, else {}.

    Raises UserError: a tag has no tokens, or a domain is called like a special token, which only a template may write.
    """
    if not pack.tag:
        return {}
    tags = {}
    special = list_special_tokens(tokenizer)
    for index, domain in enumerate(domains):
        if held := [content for content in special if content in domain]:
            raise UserError(
                f"data.sources: the domain {quoted(domain)} holds the special token {quoted(held[0])}, which a tag "
                "cannot write; rename it (domain), or leave +tag out of pack.variant"
            )
        text = pack.tag_template.replace("{domain}", domain)
        tags[index] = tokenizer.encode(text, add_special_tokens=False)
        if not tags[index]:
            raise UserError(f"pack.tag_template {pack.tag_template!r}: the tag {text!r} has no tokens; change it")
    return tags


def pad_id(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the token that fills a row, which no token sees: the tokenizer's padding, or its EOS, or 0."""
    ids = (special_id(tokenizer, name) for name in ("pad", "eos"))
    return next((index for index in ids if index is not None), 0)


def check_tokenizer(tokenizer: "PreTrainedTokenizerFast", vocab_size: int, folder: str | Path = "") -> str:
    """Refuse a tokenizer made for another model: one whose own tokens, BOS, EOS or padding the embedding does not hold.

    Tokens added beyond the base vocabulary may lie outside (Gemma 3 carries one for images); `check_store` catches them
    where the corpus uses them.

    vocab_size: V, rows of the model's embedding.
    folder: what it was read from. transformers adds a BOS or EOS that the folder's tokenizer.json lacks. Return, in
        words, which it added, whose rows of the embedding nothing was trained on; or "".
    Raises UserError: a token id is V or more, or the vocabulary lacks one of the three.
    """
    own = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False).values()
    if (largest := max(own, default=-1)) >= vocab_size:
        raise UserError(
            f"the tokenizer's token ids go to {largest} but the model's vocabulary has {vocab_size}: "
            "they do not belong together; use the model's own tokenizer"
        )
    held, added = Path(folder, "tokenizer.json"), []
    for name in ("bos", "eos", "pad"):
        index, content = special_id(tokenizer, name), getattr(tokenizer, f"{name}_token")
        shown = f"{name.upper()} {quoted(content)}"
        if index is not None and index >= vocab_size:
            raise UserError(
                f"the tokenizer's {shown} is the token id {index} but the model's vocabulary has {vocab_size}; name a "
                f"token of the model ({name}_token in tokenizer_config.json), or make its embedding larger"
            )
        # A tokenizer.json takes a second to read.
        if name != "pad" and index is not None and index > largest and held.is_file() and not _holds(held, content):
            added.append(f"{shown} (id {index})")
    if not added:
        return ""
    return f"tokenizer.json lacks {' and '.join(added)}: added to the tokenizer, and the model was never trained on it"


def _holds(tokenizer: Path, content: str) -> bool:
    read = read_json(tokenizer, "model.source", most=1 << 28)
    return any(token["content"] == content for token in read.get("added_tokens", ()))


def check_store(store: Documents, vocab_size: int) -> None:
    """Refuse a corpus that the embedding does not hold. Raises UserError: a token id is `vocab_size` or more."""
    if store.largest_token >= vocab_size:
        raise UserError(
            f"the corpus holds the token id {store.largest_token} but the model's vocabulary has {vocab_size}: "
            "tokenise it with the model's own tokenizer"
        )
