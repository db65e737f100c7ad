"""The small corpus of a whole run, and the rows that a run must take of it, counted out one token after another.

A word is a token, so both sides know the tokens of a text. Both draw from the same random streams
(`torchtrain.data.streams.random_stream` says which key each has). Nothing else of the plan is shared.

Legend: T tokens of a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from parity_tests.gate.case import RUN_ROWS, RUN_STEPS, SIZES, RowTokens, draw_targets
from parity_tests.gate.spec import CaseSpec

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
WORDS = (PAD, EOS, BOS, *(f"w{number}" for number in range(3, SIZES["vocab_size"])))
DOMAINS = ("w5", "w7")  # a domain's name is a word: a tag says it in a token of its own
TAG_WORD = "w4"  # comes before it
RESUMED_AFTER = 2  # steps: the run is interrupted in a later one
HELD_OUT_SHARE, HELD_OUT_ROWS = 0.2, 2  # rows for each domain
_SHUFFLE, _INTERLEAVE, _HELD_OUT, _ROWS = 0, 1, 2, 6
# Tokens of each document for rows of 53, by domain: some are cut twice, one is a word and its end. With tags the first
# epoch has four rows and the second five.
_LENGTHS = ((70, 12, 3, 9, 6), (2, 41, 25, 120, 7))


@dataclass(frozen=True)
class RunCorpus:
    """Documents in their order: the tokens of each with its end, and its domain."""

    documents: tuple[np.ndarray, ...]
    domains: tuple[int, ...]
    seed: int  # of the run
    spec: CaseSpec
    targets: tuple[np.ndarray, ...] = ()  # of documents with answers

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
        if self.targets:
            yield from self._whole_in_rows(chosen, epoch)
            return
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

    def _whole_in_rows(self, chosen: Sequence[int], epoch: int) -> list[RowTokens]:
        """Put each document, the longest first, into the fullest row that holds it, the last filled of equals."""
        anchor, rows = anchor_ids(self.spec), list[dict[int, int]]()
        parts = {}  # of each document in the epoch's order; under `anchor` a BOS of its own is left to the row
        for place, number in enumerate(self._stream(_SHUFFLE, epoch).permutation(len(chosen))):
            i = chosen[number]
            own = int(self.spec.variant == "anchor" and len(anchor) == 1 and self.documents[i][0] == anchor[0])
            parts[place] = self.documents[i][own:], self.targets[i][own:], self.domains[i]
        filled: list[int] = []  # rows in the order in which they were filled
        for place in sorted(parts, key=lambda place: (-len(parts[place][0]), place)):
            size = len(parts[place][0])
            room = [self.spec.tokens - len(anchor) - sum(row.values()) for row in rows]
            fitting = [r for r in range(len(rows)) if room[r] >= size]
            if not fitting:
                rows.append({})
                fitting, room = [len(rows) - 1], [*room, 0]
            best = min(fitting, key=lambda r: (room[r], -max(n for n, f in enumerate([r, *filled]) if f == r)))
            rows[best][place] = size
            filled.append(best)
        made = []
        for number in self._stream(_ROWS, epoch).permutation(len(rows)):
            documents, targets, domains = zip(*(parts[place] for place in sorted(rows[number])), strict=True)
            tags, padding = (np.array([], dtype=np.int64),) * len(documents), self.spec.tokens - len(anchor)
            made.append(RowTokens(anchor, documents, tags, padding - sum(map(len, documents)), 0, domains, targets))
        return made


def draw_corpus(spec: CaseSpec) -> RunCorpus:
    """Draw the corpus of a case. Documents with answers fit into a row; of one domain they begin with the anchor."""
    random = np.random.default_rng((spec.seed, 2))
    documents, domains = [], []
    for lengths in zip(*_LENGTHS, strict=True):
        for domain, length in enumerate(lengths):
            words = random.integers(len((PAD, EOS, BOS)), len(WORDS), max(1, length * spec.tokens // 53 - 1))
            if spec.answers:
                words = np.append([WORDS.index(BOS)] * domain, words[: spec.tokens // 2]).astype(np.int64)
            documents.append(np.append(words, WORDS.index(EOS)))
            domains.append(domain)
    targets = tuple(draw_targets(random, len(document)) for document in documents) if spec.answers else ()
    return RunCorpus(tuple(documents), tuple(domains), spec.seed + 3, spec, targets)


def anchor_ids(spec: CaseSpec) -> np.ndarray:
    """The tokens that open every row: BOS, then others. int64 [anchor_tokens]."""
    return np.array([WORDS.index(BOS), *range(8, 8 + spec.anchor_tokens)][: spec.anchor_tokens], dtype=np.int64)


def tag_ids(domain: int) -> list[int]:
    """The tokens of a domain's tag."""
    return [WORDS.index(TAG_WORD), WORDS.index(DOMAINS[domain])]
