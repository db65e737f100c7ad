"""Which documents of a corpus are trained on, and how often: a plan over their lengths, before a token is read.

The budget of tokens is cut by domain, by the shares asked for or those the corpus has; in each domain it is cut between
long documents and short ones; and each such class is filled with its documents in an order drawn by a seed, whole
passes first, until it holds its part. So the mixture over domains stays what it is while long documents become more
(per-source length up-sampling, arXiv 2402.10171, section 3: there, short documents are left out at random, one in ten
is kept, until each domain has its budget; `long_weight: 10` is the same odds).

Legend: n documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.config import MixtureConfig
from torchtrain.data.packing import MIX, random_stream


@dataclass(frozen=True)
class DocumentClass:
    """The long or the short documents of a domain, and how many tokens of them are wanted."""

    domain: int
    long: bool
    tokens: int  # that the corpus holds
    wanted: int


def repeats_of(lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], mixture: MixtureConfig) -> np.ndarray:
    """Return how often each document is taken, uint16 [n]: 0 is left out.

    Each class has the fewest tokens that make its part, or `most_repeats` passes where that is less.

    Args:
        lengths: int [n], tokens of each document.
        domains: int [n], an index into `names`.
        names: of the domains.
        mixture: what is wanted.

    Raises:
        UserError: `shares` names a domain that the corpus does not have, or leaves one out.
    """
    repeats = np.zeros(len(lengths), dtype=np.uint16)
    is_long = lengths >= mixture.long_tokens
    for one in classes_of(lengths, domains, names, mixture):
        own = np.flatnonzero((domains == one.domain) & (is_long == one.long))
        if not len(own):
            continue
        passes = min(one.wanted // one.tokens, mixture.most_repeats)
        repeats[own] = passes
        rest = one.wanted - passes * one.tokens
        if rest > 0 and passes < mixture.most_repeats:
            order = random_stream(mixture.seed, MIX, one.domain, int(one.long)).permutation(own)
            repeats[order[: np.searchsorted(np.cumsum(lengths[order]), rest) + 1]] += 1
    return repeats


def classes_of(
    lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], mixture: MixtureConfig
) -> list[DocumentClass]:
    """Return what is wanted of the long and of the short documents of each domain.

    A class without documents leaves its part to the other one of its domain.

    Args:
        lengths: int [n], tokens of each document.
        domains: int [n], an index into `names`.
        names: of the domains.
        mixture: what is wanted.

    Raises:
        UserError: as `repeats_of`.
    """
    is_long = lengths >= mixture.long_tokens
    held = [
        (int(lengths[own & is_long].sum()), int(lengths[own & ~is_long].sum()))
        for own in (domains == domain for domain in range(len(names)))
    ]
    total = mixture.tokens if mixture.tokens is not None else int(lengths.sum())
    shares = _shares([sum(pair) for pair in held], names, mixture)
    classes = []
    for domain, (long, short) in enumerate(held):
        budget = round(total * shares[domain])
        wanted = round(budget * _long_share(long, short, mixture))
        classes += [
            DocumentClass(domain, True, long, wanted),
            DocumentClass(domain, False, short, budget - wanted),
        ]
    return classes


def _shares(held: Sequence[int], names: Sequence[str], mixture: MixtureConfig) -> list[float]:
    if mixture.shares is None:
        return [tokens / max(1, sum(held)) for tokens in held]
    if unknown := set(mixture.shares) - set(names):
        raise UserError(
            f"data.mixture.shares: the corpus has no domain {quoted(sorted(unknown)[0])}; it has {', '.join(names)}"
        )
    if missing := [name for name in names if name not in mixture.shares]:
        raise UserError(
            f"data.mixture.shares: says nothing of the domain {quoted(missing[0])}; give it a share, or take it out "
            "of data.sources"
        )
    return [mixture.shares[name] / sum(mixture.shares.values()) for name in names]


def _long_share(long: int, short: int, mixture: MixtureConfig) -> float:
    """Return the share of a domain's budget that its long documents are to make; never less than they make now."""
    if not long or not short:
        return float(long > 0)
    own = long / (long + short)
    if mixture.long_weight is not None:
        return mixture.long_weight * long / (mixture.long_weight * long + short)
    return own if mixture.long_share is None else max(own, mixture.long_share)
