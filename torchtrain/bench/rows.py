"""Rows of real documents, from the corpus of a config: whatever is timed has the lengths that a corpus has."""

from typing import TYPE_CHECKING, Literal

import numpy as np

from anchorline.errors import UserError
from torchtrain.bench.config import BenchConfig
from torchtrain.config import PackConfig
from torchtrain.data import PackedRows, TokenStore, anchor_ids, check_tokenizer, pad_id, prepare
from torchtrain.modeling.source import open_tokenizer, resolve_source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Which = Literal["mean", "least"]


class Corpus:
    """The tokenised documents of a config.

    Args:
        config: whose `data` and `tokenizer` are read.

    Raises:
        UserError: as `torchtrain.data.prepare`.
    """

    def __init__(self, config: BenchConfig) -> None:
        trusted = config.tokenizer.trust_remote_code
        source = resolve_source(
            config.tokenizer.source, config.data.cache, needs="tokenizer", trust_remote_code=trusted
        )
        self.tokenizer: PreTrainedTokenizerFast = open_tokenizer(source, trusted)
        check_tokenizer(self.tokenizer, len(self.tokenizer))
        self.store: TokenStore = prepare(config.data, self.tokenizer)
        self.seed = config.seed

    def row(self, tokens: int, variant: str, which: Which = "mean") -> dict[str, np.ndarray]:
        """Return the five arrays [tokens] of a row: of all in an epoch the one whose live pairs are nearest to their
        mean, or the one with the least, which holds the shortest documents.

        The variants of one length are of one row: the same documents.
        """
        rows = self._pack(tokens, variant)
        return rows[self._choose(rows, which)]

    def live_pairs(self, tokens: int, variant: str) -> int:
        """Return the live pairs of the row nearest to the mean."""
        if variant == "full":
            return tokens * (tokens + 1) // 2
        rows = self._pack(tokens, variant)
        within = int(rows.plan(0).live_pairs()[self._choose(rows, "mean")])
        # What packing counts are pairs within documents. The anchor belongs to the first of them, or is seen by all.
        anchors = len(rows.anchor_ids)
        own = anchors * (anchors + 1) // 2
        if variant == "anchor":
            return within + own + anchors * (tokens - anchors)
        first = rows.plan(0).spans(self._choose(rows, "mean"))[0]
        return within + own + anchors * (first.stop - first.start)

    def _choose(self, rows: PackedRows, which: Which) -> int:
        pairs = rows.plan(0).live_pairs()
        return int(np.argmin(pairs if which == "least" else np.abs(pairs - pairs.mean())))

    def _pack(self, tokens: int, variant: str) -> PackedRows:
        if self.store.token_count < tokens:
            raise UserError(
                f"lengths {tokens}: the corpus of data.sources has {self.store.token_count:,} tokens; give more "
                "documents, or shorter rows"
            )
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
