"""The small corpus of a whole run, and the rows that a run must take of it, counted out one token after another.

A word is a token, so both sides know the tokens of a text. Both draw from the same random streams
(`torchtrain.data.streams.random_stream` says which key each has). Nothing else of the plan is shared.

Legend: T tokens of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from parity_tests.gate.case import RUN_ROWS, RUN_STEPS, SIZES, RowTokens
from parity_tests.gate.spec import CaseSpec

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
WORDS = (PAD, EOS, BOS, *(f"w{number}" for number in range(3, SIZES["vocab_size"])))
DOMAINS = ("w5", "w7")  # a domain's name is a word: a tag says it in a token of its own
TAG_WORD = "w4"  # comes before it
RESUMED_AFTER = 2  # steps: the run is interrupted in a later one
HELD_OUT_SHARE, HELD_OUT_ROWS = 0.2, 2  # rows for each domain
_SHUFFLE, _INTERLEAVE, _HELD_OUT = range(3)
# Tokens of each document for rows of 53, by domain: some are cut twice, one is a word and its end.
_LENGTHS = ((70, 12, 30, 9, 20), (2, 41, 25, 120, 7))


@dataclass(frozen=True)
class RunCorpus:
    """Documents in their order: the tokens of each with its end, and its domain."""

    documents: tuple[np.ndarray, ...]
    domains: tuple[int, ...]
    seed: int  # of the run
    spec: CaseSpec

    def training_rows(self) -> list[RowTokens]:
        """The rows of all steps, through the epochs."""
        train = [i for i in range(len(self.documents)) if i not in {j for held in self._held_out for j in held}]
        return list(islice((row for epoch in count() for row in self._rows(train, epoch)), RUN_STEPS * RUN_ROWS))

    def held_out_rows(self) -> list[RowTokens]:
        """The rows that are measured before and after training."""
        return [row for held in self._held_out for row in islice(self._rows(held, 0), HELD_OUT_ROWS)]

    @property
    def _held_out(self) -> list[list[int]]:
        held = []
        for domain in range(len(DOMAINS)):
            own = [i for i, of in enumerate(self.domains) if of == domain]
            held.append(sorted(self._stream(_HELD_OUT, domain).permutation(own)[: round(HELD_OUT_SHARE * len(own))]))
        return held

    def _stream(self, *key: int) -> np.random.Generator:
        return np.random.default_rng(np.random.SeedSequence(self.seed, spawn_key=key))

    def _rows(self, chosen: Sequence[int], epoch: int) -> Iterator[RowTokens]:
        """Lay documents end to end in the epoch's order; cut where a row is full; pad the last row."""
        anchor, tagged = anchor_ids(self.spec), "+tag" in self.spec.variant
        documents: list[np.ndarray] = []
        domains: list[int] = []
        room, number = self.spec.tokens - len(anchor), 0

        def row() -> RowTokens:
            tags = tuple(np.array(tag_ids(domain) if tagged else [], dtype=np.int64) for domain in domains)
            seed = np.random.SeedSequence(self.seed, spawn_key=(_INTERLEAVE, epoch, number))
            return RowTokens(anchor, tuple(documents), tags, room, seed, tuple(domains))

        for i in self._stream(_SHUFFLE, epoch).permutation(len(chosen)):
            rest, domain = self.documents[chosen[i]], self.domains[chosen[i]]
            tag = len(tag_ids(domain)) if tagged else 0
            while len(rest):
                if room <= tag:
                    yield row()
                    documents, domains, room, number = [], [], self.spec.tokens - len(anchor), number + 1
                part, rest = rest[: room - tag], rest[room - tag :]
                documents.append(part)
                domains.append(domain)
                room -= tag + len(part)
        yield row()


def draw_corpus(spec: CaseSpec) -> RunCorpus:
    """Draw the corpus of a case."""
    random = np.random.default_rng((spec.seed, 2))
    documents, domains = [], []
    for lengths in zip(*_LENGTHS, strict=True):
        for domain, length in enumerate(lengths):
            words = random.integers(len((PAD, EOS, BOS)), len(WORDS), max(1, length * spec.tokens // 53 - 1))
            documents.append(np.append(words, WORDS.index(EOS)))
            domains.append(domain)
    return RunCorpus(tuple(documents), tuple(domains), spec.seed + 3, spec)


def anchor_ids(spec: CaseSpec) -> np.ndarray:
    """The tokens that open every row: BOS, then others. int64 [anchor_tokens]."""
    return np.array([WORDS.index(BOS), *range(8, 8 + spec.anchor_tokens)][: spec.anchor_tokens], dtype=np.int64)


def tag_ids(domain: int) -> list[int]:
    """The tokens of a domain's tag."""
    return [WORDS.index(TAG_WORD), WORDS.index(DOMAINS[domain])]
