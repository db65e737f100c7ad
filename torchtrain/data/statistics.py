"""Counts what a store holds: domains, lengths, and the attention that packing leaves.

Sequences are the pieces of documents in rows, as in the paper's table of data statistics (arXiv 2411.13476, appendix
C): its mixture ratio is a domain's share of them. Rows are those of sequential packing in the first epoch, without
anchor and tags.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtrain.config import LossWeightConfig, MixtureConfig
from torchtrain.data.mixture import count_classes
from torchtrain.data.packing import PackPlan
from torchtrain.data.store import TokenStore
from torchtrain.data.weights import weigh_buckets

ROW_LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)


@dataclass(frozen=True)
class DomainStatistics:
    """One domain: its documents, or, under a mixture, those taken, each as often as it is."""

    domain: str
    documents: int
    tokens: int
    token_share: float
    long_token_share: float  # of the domain's tokens: documents of at least `long_tokens`
    mean: float
    median: float
    longest: int


@dataclass(frozen=True)
class ContextStatistics:
    """Targets whose predictions see from `start` tokens to twice as many, and what each counts."""

    start: int
    targets: int
    weight: float


@dataclass(frozen=True)
class RowStatistics:
    """Rows of one length: how many, the sequences that each domain has in them, and what attention is left."""

    sequence_length: int  # T
    rows: int  # the last may be filled in part
    sequences: dict[str, int]  # by domain: pieces of its documents
    mixture_ratio: dict[str, float]
    live_pair_ratio: float  # r = sum over sequences of length^2 / T^2, in the mean of rows
    tail: int  # of the weights of `contexts`: the largest power of two in a quarter of a row
    contexts: list[ContextStatistics]  # of documents apart from one another


@dataclass(frozen=True)
class MixtureStatistics:
    """What a mixture asked for in one class of documents, and what there is."""

    domain: str
    long: bool
    documents: int
    tokens: int
    wanted: int
    taken: int
    distinct: int  # documents taken at least once
    most_repeats: int


@dataclass(frozen=True)
class StoreStatistics:
    """All of it. `before` is what the corpus holds where not every document is taken once."""

    fingerprint: str
    copies: int
    long_tokens: int
    domains: list[DomainStatistics]
    all: DomainStatistics
    before: list[DomainStatistics] | None
    mixture: list[MixtureStatistics] | None
    rows: list[RowStatistics]


def count_store(store: TokenStore, row_lengths: Sequence[int] = ROW_LENGTHS) -> StoreStatistics:
    """Count everything from a store's index, for rows of each length."""
    mixture = None if store.header.mixture is None else MixtureConfig.model_validate(store.header.mixture)
    long_tokens = (mixture or MixtureConfig()).long_tokens
    taken = np.repeat(np.arange(len(store)), 1 if store.repeats is None else store.repeats)
    lengths, domains = store.lengths[taken], store.document_domains[taken]

    def by_domain(lengths: np.ndarray, domains: np.ndarray) -> list[DomainStatistics]:
        own = (lengths[domains == number] for number in range(len(store.domains)))
        tokens = int(lengths.sum())
        return [_domain(name, of, tokens, long_tokens) for name, of in zip(store.domains, own, strict=True)]

    return StoreStatistics(
        fingerprint=store.header.fingerprint,
        copies=store.copies,
        long_tokens=long_tokens,
        domains=by_domain(lengths, domains),
        all=_domain("all", lengths, int(lengths.sum()), long_tokens),
        before=None if store.repeats is None else by_domain(store.lengths, store.document_domains),
        mixture=None if mixture is None else _mixture(store, mixture),
        rows=[count_rows(lengths, domains, store.domains, length) for length in row_lengths],
    )


def count_rows(
    lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], sequence_length: int, seed: int = 0
) -> RowStatistics:
    """Pack documents one after another and count what rows hold: lengths and domains, an index into names, int [n]."""
    plan = PackPlan(lengths, sequence_length, np.zeros_like(lengths), seed)
    documents, tokens = plan.pieces
    sequences = np.bincount(domains[documents], minlength=len(names))
    tail = 1 << max(0, (sequence_length // 4).bit_length() - 1)
    starts = [1 << power for power in range(sequence_length.bit_length())]
    # A piece of n tokens has n - 1 targets, which see 1 to n - 1 tokens.
    targets = np.array([np.clip(tokens - start, 0, start).sum() for start in starts])
    far = starts.index(tail)
    weights_K = weigh_buckets(np.array([targets[:far].sum(), *targets[far:]]), LossWeightConfig(tail=tail))
    weights = [1.0] * far + weights_K[1:].tolist()
    squares = int(tokens @ tokens)  # below 2^63 up to 10^11 tokens in rows of 2^24
    return RowStatistics(
        sequence_length=sequence_length,
        rows=len(plan),
        sequences=dict(zip(names, sequences.tolist(), strict=True)),
        mixture_ratio=dict(zip(names, (sequences / max(1, len(tokens))).tolist(), strict=True)),
        live_pair_ratio=squares / max(1, len(plan) * sequence_length**2),
        tail=tail,
        contexts=[ContextStatistics(*one) for one in zip(starts, targets.tolist(), weights, strict=True) if one[1]],
    )


def _domain(name: str, own: np.ndarray, tokens: int, long_tokens: int) -> DomainStatistics:
    held = int(own.sum())
    return DomainStatistics(
        domain=name,
        documents=len(own),
        tokens=held,
        token_share=held / max(1, tokens),
        long_token_share=int(own[own >= long_tokens].sum()) / max(1, held),
        mean=held / max(1, len(own)),
        median=float(np.median(own)) if len(own) else 0.0,
        longest=int(own.max(initial=0)),
    )


def _mixture(store: TokenStore, mixture: MixtureConfig) -> list[MixtureStatistics]:
    assert store.repeats is not None
    classes = []
    lengths, domains = store.lengths[store.kept], store.document_domains[store.kept]
    for one in count_classes(lengths, domains, store.domains, mixture):
        own = store.kept & (store.document_domains == one.domain) & ((store.lengths >= mixture.long_tokens) == one.long)
        repeats = store.repeats[own].astype(np.int64)
        taken, distinct = int((repeats * store.lengths[own]).sum()), int((repeats > 0).sum())
        counts = int(own.sum()), one.tokens, one.wanted, taken, distinct, int(repeats.max(initial=0))
        classes.append(MixtureStatistics(store.domains[one.domain], one.long, *counts))
    return classes
