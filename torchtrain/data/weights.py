"""What the loss of each target counts: weights by effective context.

The effective context of a target is the number of tokens that its prediction sees, by `document_ids` alone; layers with
a window may see fewer. A target weighs 1, and in the tail, whose buckets double, more: under `inverse_frequency` bucket
k of K that have targets gives each of its n_k targets

    extra x (n_1 + .. + n_K) / (K x n_k),    at most `most`

so that each bucket gets as much in all. Frequencies are those of the first rows. EXACT (arXiv 2605.10544) says that a
fixed extra weight is shared out by inverse frequency of logarithmic buckets. Where the tail begins, a bucket's width,
the limit, and the rows that are counted are our choices, because the paper's text was not at hand.

Legend: T tokens of a row · K buckets, that before the tail the first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np

from anchorline.errors import UserError
from torchtrain.config import LossWeightConfig
from torchtrain.marks import ANCHOR, IGNORED, PADDING


def effective_contexts(document_ids_T: np.ndarray) -> np.ndarray:
    """Return how many tokens each token sees, itself included, int64 [T]; 0 for padding."""
    order_T = np.argsort(document_ids_T, kind="stable")
    sorted_T = document_ids_T[order_T]
    seen_T = np.empty(len(order_T), dtype=np.int64)
    seen_T[order_T] = np.arange(1, len(order_T) + 1) - np.searchsorted(sorted_T, sorted_T)
    seen_T[document_ids_T > ANCHOR] += (document_ids_T == ANCHOR).sum()
    seen_T[document_ids_T == PADDING] = 0
    return seen_T


def find_buckets(contexts: np.ndarray, tail: int) -> np.ndarray:
    """Return the bucket of each effective context: 0 before the tail, 1 from `tail` on, 2 from twice that on, .."""
    return np.frexp(contexts // tail)[1]


def weigh_buckets(targets_K: np.ndarray, settings: LossWeightConfig) -> np.ndarray:
    """Return the weight of a target of each bucket, float32 [K], given how many targets each has."""
    tail = targets_K[1:].astype(np.float64)
    extra = np.full(len(tail), settings.extra)
    if settings.share == "inverse_frequency":
        seen = tail > 0
        extra[seen] = np.minimum(settings.most, settings.extra * tail.sum() / (seen.sum() * tail[seen]))
        extra[~seen] = settings.most
    return np.concatenate([[1.0], 1 + extra]).astype(np.float32)


@dataclass(frozen=True)
class LossWeights:
    """The weights of a run's buckets, and the targets that were counted in each."""

    settings: LossWeightConfig
    targets_K: np.ndarray  # int64
    weights_K: np.ndarray  # float32

    @classmethod
    def measure(cls, settings: LossWeightConfig, rows: Iterable[Mapping[str, np.ndarray]]) -> Self:
        """Count the targets of rows, and weigh the buckets. Raises UserError: none is in the tail, or all weigh 0."""
        counted, longest, tokens = np.zeros(0, dtype=np.int64), 0, 0
        for row in rows:
            tokens = len(row["document_ids"])
            contexts = effective_contexts(row["document_ids"])[row["shift_labels"] != IGNORED]
            longest = max(longest, int(contexts.max(initial=0)))
            # A bucket without a target here has its weight, too.
            buckets = 1 + int(find_buckets(np.array(tokens), settings.tail))
            counted = np.zeros(buckets, dtype=np.int64) if not len(counted) else counted
            counted += np.bincount(find_buckets(contexts, settings.tail), minlength=buckets)
        if longest < settings.tail:
            raise UserError(
                f"train.loss_weight.tail {settings.tail:,}: no target of the first rows of {tokens:,} tokens sees so "
                f"many; the most is {longest:,}: lower it, or make rows of longer documents"
            )
        weights_K = weigh_buckets(counted, settings)
        if not weights_K[counted > 0].any():
            raise UserError(
                f"train.loss_weight.extra {settings.extra:g}: every target weighs 0, because all are in the tail; "
                "raise it, or tail"
            )
        return cls(settings, counted, weights_K)

    def weigh(self, row: Mapping[str, np.ndarray], random: np.random.Generator) -> dict[str, np.ndarray]:
        """Return a row with `weights`, float32 [T], times its own. random: the row's own generator, for `shuffle`."""
        weights_T = self.weights_K[find_buckets(effective_contexts(row["document_ids"]), self.settings.tail)]
        if self.settings.shuffle:
            is_target_T = row["shift_labels"] != IGNORED
            weights_T[is_target_T] = random.permutation(weights_T[is_target_T])
        return {**row, "weights": weights_T * row.get("weights", np.float32(1))}

    def __str__(self) -> str:
        """The weight of each bucket, for people."""
        starts = [0, *(self.settings.tail << k for k in range(len(self.weights_K) - 1))]
        pairs = zip(starts, self.weights_K, self.targets_K, strict=True)
        text = ", ".join(f"from {start:,} on {weight:.3g} ({n:,} targets)" for start, weight, n in pairs)
        return text + (" · given to targets at random" if self.settings.shuffle else "")
