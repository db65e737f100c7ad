"""Finds the copies among the documents of a corpus, and draws how often each document is trained on.

- Copies have the same tokens. Near duplicates share most of their words (MinHash). Both count as one text.
- A mixture takes documents more than once, or not at all.

Legend: n documents.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from anchorline.errors import UserError, quoted
from torchtrain.config import MixtureConfig
from torchtrain.data.packing import MIX, random_stream

BUCKETS = 14
_SHINGLES = 4096  # hashed at one time: 112 numbers each


# --- duplicates -------------------------------------------------------------------------------------------------------


class Signer:
    """Signs texts by datatrove's MinHash. Case, accents and punctuation do not count; other numbers are other words.

    A signature is 14 numbers, each the hash of 8 minima over the text's runs of 5 words. Two texts that have 80 per
    cent of their runs in common share one of the numbers with odds of 92 per cent (1 - (1 - 0.8^8)^14). A text of fewer
    than 5 words has no signature: zeros.
    """

    def __init__(self) -> None:
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
        from datatrove.utils.hashing import HashConfig
        from datatrove.utils.text import TextNormConfig, ngrams, simplify_text
        from datatrove.utils.word_tokenizers import WhitespaceTokenizer

        # datatrove's default counts all numbers as one word: then every table would be every other. Its default hash,
        # xxhash, refuses a str from version 4 of that package on.
        norm = TextNormConfig(norm_numbers=False)
        config = MinhashConfig(num_buckets=BUCKETS, norm_config=norm, hash_config=HashConfig(hash_fc="sha1"))
        self._minhash = MinhashDedupSignature(".", config, language=WhitespaceTokenizer())  # type: ignore[arg-type]
        self._simplify = partial(simplify_text, config=norm)
        self._runs = partial(ngrams, n=config.n_grams)

    def sign(self, text: str) -> np.ndarray:
        """Return the signature of a text, uint64 [14]. Words are what white space divides."""
        hash_tokens: Any = self._minhash._hash_func
        hashes = (hash_tokens(" ".join(run)) for run in self._runs(self._simplify(text).split()))
        lowest: np.ndarray | None = None
        while block := list(islice(hashes, _SHINGLES)):
            minima = np.array(self._minhash.get_signature(np.array(block, dtype=np.uint64).reshape(-1, 1)), np.uint64)
            lowest = minima if lowest is None else np.minimum(lowest, minima)
        if lowest is None:
            return np.zeros(BUCKETS, dtype=np.uint64)
        digests = (hashlib.blake2b(bucket.tobytes(), digest_size=8).digest() for bucket in lowest)
        return np.array([int.from_bytes(digest, "little") or 1 for digest in digests], dtype=np.uint64)


def group_copies(hashes: np.ndarray, signatures: np.ndarray | None) -> np.ndarray:
    """Return the same number for documents of one text, int64 [n], counted from 0.

    Args:
        hashes: uint64 [n], of each document's tokens.
        signatures: uint64 [n, 14]; None: only documents of the same tokens are one text. With them, two documents that
            share a number are one text, as is every document that shares a number with one of the two.
    """
    same = np.unique(hashes, return_inverse=True)[1].reshape(-1)
    if signatures is None:
        return same
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # A graph with a node for each document and one for each thing that documents share.
    shared = [same]
    for bucket in signatures.T:
        keys = np.unique(bucket, return_inverse=True)[1].reshape(-1)
        none = bucket == 0
        keys[none] = len(keys) + np.flatnonzero(none)  # shared with no other document
        shared.append(keys)
    sizes = [len(same), *(int(keys.max(initial=0)) + 1 for keys in shared)]
    ends = np.concatenate([start + keys for start, keys in zip(np.cumsum(sizes), shared, strict=False)])
    documents = np.tile(np.arange(len(same)), len(shared))
    edges = coo_array((np.ones(len(ends), dtype=bool), (documents, ends)), shape=(sum(sizes), sum(sizes)))
    groups = connected_components(edges, directed=False)[1][: len(same)]
    return np.unique(groups, return_inverse=True)[1].reshape(-1)


def find_firsts(groups: np.ndarray) -> np.ndarray:
    """Return whether each document is the first of its group, bool [n]."""
    first = np.zeros(len(groups), dtype=bool)
    first[np.unique(groups, return_index=True)[1]] = True
    return first


# --- mixtures ---------------------------------------------------------------------------------------------------------


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
    other one of its domain.

    Raises:
        UserError: as `draw_repeats`.
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
        classes += [
            DocumentClass(domain, True, long, wanted),
            DocumentClass(domain, False, short, budget - wanted),
        ]
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
