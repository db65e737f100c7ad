"""The random streams that choose and order documents: one for each purpose."""

import numpy as np

# What a stream is for: the head of its spawn key, so that no two purposes share one.
SHUFFLE, INTERLEAVE, HELD_OUT, SAMPLE_FILES, SAMPLE, MIX, ROWS, TAIL, WEIGHTS = range(9)


def random_stream(seed: int, *key: int) -> np.random.Generator:
    """Return the generator of one purpose: the same for the same seed and key, independent of every other."""
    # A spawn key, not a list of seeds: SeedSequence([a, b]) and SeedSequence([a, b, 0]) are the same.
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=key))
