"""Near duplicates by datatrove's MinHash: documents that share most of their words, in whatever case, accents and
punctuation; other numbers are other words.

A document's signature is 14 numbers, each the hash of 8 minima over its runs of 5 words; two documents that have 80 %
of their runs in common share one of the numbers with odds of 92 % (1 - (1 - 0.8^8)^14: datatrove 0.10.1,
`dedup/minhash.py`). Who shares one is of one group, as is whoever shares one with them.

Legend: n documents.
"""

import hashlib
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

BUCKETS = 14
_SHINGLES = 4096  # hashed at one time: 112 numbers each


class Signer:
    """Signs texts. A text of fewer than 5 words has no signature: zeros."""

    def __init__(self) -> None:
        from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
        from datatrove.utils.hashing import HashConfig
        from datatrove.utils.text import TextNormConfig, ngrams, simplify_text
        from datatrove.utils.word_tokenizers import WordTokenizer

        class Words(WordTokenizer):
            """Words are what white space divides: datatrove's own need spaCy."""

            def word_tokenize(self, text: str) -> list[str]:
                return text.split()

            def sent_tokenize(self, text: str) -> list[str]:
                raise NotImplementedError

            def span_tokenize(self, text: str) -> list[tuple[int, int]]:
                raise NotImplementedError

        # Its other hash, xxhash, takes no str from version 4 of that package on.
        # Were numbers alike, as its default has it, every table would be every other.
        norm = TextNormConfig(norm_numbers=False)
        config = MinhashConfig(num_buckets=BUCKETS, norm_config=norm, hash_config=HashConfig(hash_fc="sha1"))
        self._minhash = MinhashDedupSignature(".", config, language=Words())  # type: ignore[arg-type]
        self._simplify = partial(simplify_text, config=config.norm_config)
        self._runs = partial(ngrams, n=config.n_grams)

    def sign(self, text: str) -> np.ndarray:
        """Return the signature of a text, uint64 [14]."""
        hash_of: Any = self._minhash._hash_func  # of str, whatever its type says
        hashes = (hash_of(" ".join(run)) for run in self._runs(self._simplify(text).split()))
        lowest: np.ndarray | None = None
        while block := list(islice(hashes, _SHINGLES)):
            minima = np.array(self._minhash.get_signature(np.array(block, dtype=np.uint64).reshape(-1, 1)), np.uint64)
            lowest = minima if lowest is None else np.minimum(lowest, minima)
        if lowest is None:
            return np.zeros(BUCKETS, dtype=np.uint64)
        digests = (hashlib.blake2b(bucket.tobytes(), digest_size=8).digest() for bucket in lowest)
        return np.array([int.from_bytes(digest, "little") or 1 for digest in digests], dtype=np.uint64)


def near_groups(signatures: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return groups of near duplicates, int64 [n], numbered from 0.

    Args:
        signatures: uint64 [n, 14].
        groups: int64 [n], the same number for documents of the same content.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    # A graph of documents and of what they share.
    shared = [groups]
    for bucket in signatures.T:
        keys = np.unique(bucket, return_inverse=True)[1].reshape(-1)
        none = bucket == 0
        keys[none] = len(keys) + np.flatnonzero(none)  # shares with nobody
        shared.append(keys)
    sizes = [len(groups), *(int(keys.max(initial=0)) + 1 for keys in shared)]
    ends = np.concatenate([start + keys for start, keys in zip(np.cumsum(sizes), shared, strict=False)])
    documents = np.tile(np.arange(len(groups)), len(shared))
    edges = coo_array((np.ones(len(ends), dtype=bool), (documents, ends)), shape=(sum(sizes), sum(sizes)))
    found = connected_components(edges, directed=False)[1][: len(groups)]
    return np.unique(found, return_inverse=True)[1].reshape(-1)
