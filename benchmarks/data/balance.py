"""How long data-parallel ranks wait for the fullest row of a step, by simulation (`torchtrain.data.statistics`)."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import inputs
from torchtrain.data.statistics import balance_of
from torchtrain.tests.data_fixtures import PUBLISHED, published_corpus

DOCUMENTS = 1_900_000  # 2 billion tokens
SEQUENCE_LENGTH = 65_536
DEMO_LENGTH = 8_192  # the demo's corpus has too few tokens for more rows


def simulate(work: Path) -> list[dict[str, Any]]:
    """Return the waiting of 8, 64 and 512 ranks for each corpus."""
    lengths, domains = published_corpus(DOCUMENTS, 106_000_000 * DOCUMENTS // 100_000)
    corpora = {
        "demo": (_demo(work), DEMO_LENGTH),
        "SlimPajama, every document as long as its domain's mean": (lengths, SEQUENCE_LENGTH),
        f"SlimPajama, lengths spread by {inputs.SPREAD:g} about that mean": (
            _spread(lengths, domains),
            SEQUENCE_LENGTH,
        ),
    }
    return [
        {"corpus": name, "documents": len(held), "tokens": int(held.sum())} | asdict(one)
        for name, (held, length) in corpora.items()
        for one in balance_of(held, [length])
    ]


def _spread(lengths: np.ndarray, domains: np.ndarray) -> np.ndarray:
    """Return lognormal lengths of which each domain has as many, and the same tokens up to rounding."""
    drawn = np.random.default_rng(0).lognormal(0, inputs.SPREAD, len(lengths))
    spread = np.empty_like(lengths)
    for number in range(len(PUBLISHED)):
        own = domains == number
        spread[own] = np.maximum(1, np.round(drawn[own] / drawn[own].mean() * lengths[own]))
    return spread


def _demo(work: Path) -> np.ndarray:
    """Return the tokens of each document of the demo's corpus, by SmolLM2's tokenizer."""
    path = work / "demo-lengths.npy"
    if not path.exists():
        from torchtrain.config import DataConfig, Source
        from torchtrain.data import prepare

        names = ("speeches", "encyclopedia", "code")
        tokenizer, _ = inputs.tokenizer(work)
        sources = [Source(demo=name) for name in names]
        np.save(path, prepare(DataConfig(sources=sources, cache=str(work / "cache")), tokenizer).lengths)
    return np.load(path)
