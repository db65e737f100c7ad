"""Counts what a store holds: domains, lengths, the attention that packing leaves, and how long ranks wait.

Sequences are the pieces of documents in rows, as in the paper's table of data statistics (arXiv 2411.13476, appendix
C): its mixture ratio is a domain's share of them, its token ratio a domain's share of the tokens. Rows are those of
sequential packing in the first epoch, without anchor and tags.

Legend: n documents · T tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchtrain.config import MixtureConfig
from torchtrain.data.packing import SHUFFLE, PackPlan, random_stream
from torchtrain.data.selection import count_classes
from torchtrain.data.store import TokenStore

ROW_LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
RANKS = (8, 64, 512)
_BINS_PER_DOUBLING = 2


@dataclass(frozen=True)
class DomainStatistics:
    """One domain: its documents, or, under a mixture, those taken, each as often as it is."""

    domain: str
    documents: int
    tokens: int
    document_share: float
    token_share: float
    long_token_share: float  # of the domain's tokens: documents of at least `long_tokens`
    mean: float
    median: float
    longest: int


@dataclass(frozen=True)
class RowStatistics:
    """Rows of one length: how many, the sequences that each domain has in them, and what attention is left."""

    sequence_length: int  # T
    rows: int  # the last may be filled in part
    sequences: dict[str, int]  # by domain: pieces of its documents
    mixture_ratio: dict[str, float]
    token_ratio: dict[str, float]
    live_pair_ratio: float  # r = sum over sequences of length^2 / T^2, in the mean of rows
    attention_speedup: float  # pairs of full attention over those that are left


@dataclass(frozen=True)
class Balance:
    """How long data-parallel ranks wait when each takes a row: a step's attention takes as long as its fullest row."""

    sequence_length: int
    ranks: int
    steps: int  # whole ones
    sequential: float  # live pairs of a step's fullest row over the mean of its rows, in the mean of steps
    by_length: float  # the same under `pack.strategy: by_length`


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
class Histogram:
    """Documents and tokens by length: bin i holds lengths from `edges[i]`, included, to `edges[i + 1]`, excluded."""

    edges: list[int]
    documents: dict[str, list[int]]  # by domain
    tokens: dict[str, list[int]]


@dataclass(frozen=True)
class StoreStatistics:
    """All of it. `before` is what the corpus holds where a mixture takes another choice of it."""

    fingerprint: str
    documents: int
    tokens: int
    copies: int
    near_copies: int
    long_tokens: int
    domains: list[DomainStatistics]
    all: DomainStatistics
    before: list[DomainStatistics] | None
    mixture: list[MixtureStatistics] | None
    rows: list[RowStatistics]
    balance: list[Balance]  # of the longest rows
    histogram: Histogram


def count_store(store: TokenStore, row_lengths: Sequence[int] = ROW_LENGTHS, seed: int = 0) -> StoreStatistics:
    """Count everything from a store's index.

    Args:
        store: which.
        row_lengths: T of each kind of rows.
        seed: of the order of documents.
    """
    mixture = None if store.header.mixture is None else MixtureConfig.model_validate(store.header.mixture)
    long_tokens = (mixture or MixtureConfig()).long_tokens
    every, names = np.arange(len(store)), store.domains
    taken = every if store.repeats is None else np.repeat(every, store.repeats)
    lengths, domains = store.lengths[taken], np.asarray(store.document_domains)[taken]
    before = None
    if store.repeats is not None:
        before = _domains(store.lengths, store.document_domains, names, long_tokens)
    return StoreStatistics(
        fingerprint=store.header.fingerprint,
        documents=len(taken),
        tokens=int(lengths.sum()),
        copies=store.copies,
        near_copies=store.near_copies,
        long_tokens=long_tokens,
        domains=_domains(lengths, domains, names, long_tokens),
        all=_domain("all", lengths, len(lengths), int(lengths.sum()), long_tokens),
        before=before,
        mixture=None if mixture is None else _mixture(store, mixture),
        rows=[count_rows(lengths, domains, names, length, seed) for length in row_lengths],
        balance=simulate_ranks(lengths, sorted(row_lengths)[-2:], seed=seed),
        histogram=_histogram(lengths, domains, names),
    )


def count_rows(
    lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], sequence_length: int, seed: int = 0
) -> RowStatistics:
    """Pack documents one after another and count what each row holds.

    Args:
        lengths: int [n], tokens of each document.
        domains: int [n], an index into `names`.
        names: of the domains.
        sequence_length: T.
        seed: of the order.
    """
    order = random_stream(seed, SHUFFLE, 0).permutation(len(lengths))
    ends, domains = np.cumsum(lengths[order]), domains[order]
    total = int(ends[-1]) if len(ends) else 0
    rows = -(-total // sequence_length)
    # A sequence ends where its document or its row does.
    row_ends = np.arange(1, rows, dtype=np.int64) * sequence_length
    inside = np.searchsorted(ends, row_ends)
    cutting = ends[inside] != row_ends
    inside, row_ends = inside[cutting], row_ends[cutting]
    pieces = np.diff(np.insert(ends, inside, row_ends), prepend=0)
    of_piece = np.insert(domains, inside, domains[inside])
    sequences = np.bincount(of_piece, minlength=len(names))
    tokens = np.bincount(of_piece, weights=pieces, minlength=len(names))
    squares = int(pieces @ pieces)  # below 2^63 up to 10^11 tokens in rows of 2^24
    pairs = (squares + total) // 2
    full = rows * sequence_length * (sequence_length + 1) // 2
    return RowStatistics(
        sequence_length=sequence_length,
        rows=rows,
        sequences=dict(zip(names, sequences.tolist(), strict=True)),
        mixture_ratio=dict(zip(names, (sequences / max(1, len(pieces))).tolist(), strict=True)),
        token_ratio=dict(zip(names, (tokens / max(1, total)).tolist(), strict=True)),
        live_pair_ratio=squares / max(1, rows * sequence_length**2),
        attention_speedup=full / max(1, pairs),
    )


def simulate_ranks(
    lengths: np.ndarray, row_lengths: Sequence[int], ranks: Sequence[int] = RANKS, seed: int = 0
) -> list[Balance]:
    """Simulate the first epoch. Leaves out a number of ranks that is larger than the number of rows.

    Args:
        lengths: int [n], tokens of each document.
        row_lengths: tokens of a row, the anchor not counted.
        ranks: numbers of rows at a time.
        seed: of the order of documents.
    """
    balances = []
    for T in row_lengths:
        none = np.zeros_like(lengths)
        in_order = PackPlan(lengths, T, none, seed).live_pairs()
        alike = np.sort(PackPlan(lengths, T, none, seed, strategy="by_length").live_pairs())
        for count in (count for count in ranks if count <= len(in_order)):
            balances.append(Balance(T, count, len(in_order) // count, _excess(in_order, count), _excess(alike, count)))
    return balances


def _excess(pairs: np.ndarray, together: int) -> float:
    steps = pairs[: len(pairs) // together * together].reshape(-1, together)
    return float((steps.max(1) / steps.mean(1)).mean())


def _domains(
    lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], long_tokens: int
) -> list[DomainStatistics]:
    documents, tokens = len(lengths), int(lengths.sum())
    return [
        _domain(name, lengths[domains == number], documents, tokens, long_tokens) for number, name in enumerate(names)
    ]


def _domain(name: str, own: np.ndarray, documents: int, tokens: int, long_tokens: int) -> DomainStatistics:
    held = int(own.sum())
    return DomainStatistics(
        domain=name,
        documents=len(own),
        tokens=held,
        document_share=len(own) / max(1, documents),
        token_share=held / max(1, tokens),
        long_token_share=int(own[own >= long_tokens].sum()) / max(1, held),
        mean=held / max(1, len(own)),
        median=float(np.median(own)) if len(own) else 0.0,
        longest=int(own.max(initial=0)),
    )


def _mixture(store: TokenStore, mixture: MixtureConfig) -> list[MixtureStatistics]:
    assert store.repeats is not None
    rows = []
    lengths, domains = store.lengths[store.kept], store.document_domains[store.kept]
    for one in count_classes(lengths, domains, store.domains, mixture):
        own = store.kept & (store.document_domains == one.domain) & ((store.lengths >= mixture.long_tokens) == one.long)
        repeats = store.repeats[own].astype(np.int64)
        rows.append(
            MixtureStatistics(
                domain=store.domains[one.domain],
                long=one.long,
                documents=int(own.sum()),
                tokens=one.tokens,
                wanted=one.wanted,
                taken=int((repeats * store.lengths[own]).sum()),
                distinct=int((repeats > 0).sum()),
                most_repeats=int(repeats.max(initial=0)),
            )
        )
    return rows


def _histogram(lengths: np.ndarray, domains: np.ndarray, names: Sequence[str]) -> Histogram:
    longest = int(lengths.max(initial=1))
    steps = np.arange(int(np.log2(longest)) * _BINS_PER_DOUBLING + _BINS_PER_DOUBLING + 1)
    edges = np.unique(np.ceil(2.0 ** (steps / _BINS_PER_DOUBLING))).astype(np.int64)
    place = np.searchsorted(edges, lengths, side="right") - 1
    documents, tokens = {}, {}
    for number, name in enumerate(names):
        own = domains == number
        documents[name] = np.bincount(place[own], minlength=len(edges) - 1).tolist()
        counted = np.bincount(place[own], weights=lengths[own], minlength=len(edges) - 1)
        tokens[name] = [int(count) for count in counted]
    return Histogram(edges.tolist(), documents, tokens)
