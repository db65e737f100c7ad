"""Draws how often a mixture takes each document: more than once, or not at all.

Legend: n documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.config import MixtureConfig
from torchtrain.data.streams import MIX, random_stream


@dataclass(frozen=True)
class DocumentClass:
    """The long or the short documents of a domain, and how many tokens of them are wanted."""

    domain: int
    long: bool
    tokens: int  # that the corpus holds
    wanted: int


def draw_repeats(lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], mixture: MixtureConfig) -> np.ndarray:
    """Return how often each document is taken, uint16 [n]: 0 is left out.

    Each class is filled with its documents in an order drawn by the seed, whole passes first. It gets the fewest tokens
    that make its part, or `most_repeats` passes if that is less.

    lengths: int [n], tokens of each document.
    domains: int [n], an index into `names`.
    Raises UserError: `shares` names a domain that the corpus does not have, or leaves one out.
    """
    repeats = np.zeros(len(lengths), dtype=np.uint16)
    is_long = lengths >= mixture.long_tokens
    for one in count_classes(lengths, domains, names, mixture):
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


def count_classes(
    lengths: np.ndarray, domains: np.ndarray, names: Sequence[str], mixture: MixtureConfig
) -> list[DocumentClass]:
    """Return what is wanted of the long and of the short documents of each domain. Arguments as `draw_repeats`.

    The budget of tokens is cut by domain, then between long and short documents. So the shares of domains stay what
    they are while long documents become more (per-source length up-sampling, arXiv 2402.10171, section 3, which keeps
    one short document in ten: `long_weight: 10` has the same odds). A class without documents leaves its part to the
    other one of its domain. Raises UserError: as `draw_repeats`.
    """
    is_long = lengths >= mixture.long_tokens
    held = [
        (int(lengths[own & is_long].sum()), int(lengths[own & ~is_long].sum()))
        for own in (domains == domain for domain in range(len(names)))
    ]
    total = mixture.tokens if mixture.tokens is not None else int(lengths.sum())
    shares = _domain_shares([sum(pair) for pair in held], names, mixture)
    classes = []
    for domain, (long, short) in enumerate(held):
        budget = round(total * shares[domain])
        wanted = round(budget * _long_share(long, short, mixture))
        classes += [DocumentClass(domain, True, long, wanted), DocumentClass(domain, False, short, budget - wanted)]
    return classes


def _domain_shares(held: Sequence[int], names: Sequence[str], mixture: MixtureConfig) -> list[float]:
    if mixture.shares is None:
        return [tokens / max(1, sum(held)) for tokens in held]
    if unknown := set(mixture.shares) - set(names):
        raise UserError(
            f"data.mixture.shares: the corpus has no domain {quoted(sorted(unknown)[0])}; it has {', '.join(names)}"
        )
    if missing := [name for name in names if name not in mixture.shares]:
        raise UserError(
            f"data.mixture.shares: the domain {quoted(missing[0])} is missing; give it a share, or take it out of "
            "data.sources"
        )
    return [mixture.shares[name] / sum(mixture.shares.values()) for name in names]


def _long_share(long: int, short: int, mixture: MixtureConfig) -> float:
    """Return the share of a domain's budget for its long documents; never less than they have in the corpus."""
    if not long or not short:
        return float(long > 0)
    own = long / (long + short)
    if mixture.long_weight is not None:
        return mixture.long_weight * long / (mixture.long_weight * long + short)
    return own if mixture.long_share is None else max(own, mixture.long_share)
