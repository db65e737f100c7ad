"""Rows of real documents from the corpus of a config, with realistic lengths of documents."""

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
        config: with `data` and `tokenizer`.

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

    def row(self, tokens: int, variant: str, which: Which = "mean") -> dict[str, np.ndarray]:
        """Return the five arrays [tokens] of a row of the first epoch.

        The row is the one with live pairs nearest to the mean, or with the fewest. All variants of one length hold the
        same documents.

        Raises:
            UserError: the corpus is shorter than a row.
        """
        if self.store.token_count < tokens:
            raise UserError(
                f"lengths {tokens}: the corpus of data.sources has {self.store.token_count:,} tokens; give more "
                "documents, or shorter rows"
            )
        pack = PackConfig(sequence_length=tokens, variant=variant, last="drop")
        anchor, padding = anchor_ids(self.tokenizer, pack), pad_id(self.tokenizer)
        rows = PackedRows(self.store, np.arange(len(self.store)), pack, 0, anchor, {}, padding)
        pairs = rows.plan(0).live_pairs()
        return rows[int(np.argmin(pairs if which == "least" else np.abs(pairs - pairs.mean())))]
