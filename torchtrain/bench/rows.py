"""Rows of real documents, from the corpus of a config: whatever is timed has the lengths that a corpus has."""

from typing import TYPE_CHECKING

import numpy as np

from torchtrain.bench.config import BenchConfig
from torchtrain.config import PackConfig
from torchtrain.data import PackedRows, TokenStore, anchor_ids, check_tokenizer, pad_id, prepare
from torchtrain.modeling.source import open_tokenizer, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONSIDERED = 101  # rows, of which the one with the median of live pairs is taken


class Corpus:
    """The tokenised documents of a config.

    Args:
        config: whose `data` and `tokenizer` are read.

    Raises:
        UserError: as `torchtrain.data.prepare`.
    """

    def __init__(self, config: BenchConfig) -> None:
        trusted = config.tokenizer.trust_remote_code
        source = resolve_source(config.tokenizer.source, config.data.cache, weights=False, trust_remote_code=trusted)
        self.tokenizer: PreTrainedTokenizerFast = open_tokenizer(source, trusted)
        check_tokenizer(self.tokenizer, len(self.tokenizer))
        self.store: TokenStore = prepare(config.data, self.tokenizer)
        self.seed = config.seed

    def row(self, tokens: int, variant: str) -> dict[str, np.ndarray]:
        """Return the five arrays [tokens] of the middling row: of the first 101, the one with the median of live pairs.

        The variants of one length are of one row: the same documents.
        """
        rows = self._pack(tokens, variant)
        return rows[self._middling(rows)]

    def live_pairs(self, tokens: int, variant: str) -> int:
        """Return the live pairs of that row."""
        if variant == "full":
            return tokens * (tokens + 1) // 2
        rows = self._pack(tokens, variant)
        within = int(rows.plan(0).live_pairs()[self._middling(rows)])
        # What packing counts are pairs within documents: the anchor's own, and all others' with it, come on top.
        anchors = len(rows.anchor_ids)
        own = anchors * (anchors + 1) // 2
        return within + own + anchors * (tokens - anchors if variant == "anchor" else 0)

    def _middling(self, rows: PackedRows) -> int:
        pairs = rows.plan(0).live_pairs()[:_CONSIDERED]
        return int(np.argsort(pairs, kind="stable")[len(pairs) // 2])

    def _pack(self, tokens: int, variant: str) -> PackedRows:
        pack = PackConfig(sequence_length=tokens, variant=variant, last="drop")
        return PackedRows(
            self.store,
            np.arange(len(self.store)),
            pack,
            self.seed,
            anchor_ids(self.tokenizer, pack),
            {},
            pad_id(self.tokenizer),
        )
