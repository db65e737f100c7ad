"""Make synthetic documents of facts and questions, and the rows in which recall is measured.

A document holds filler words (`f3`), facts (`v17.5`: key 17 has value 5) and questions. A question is a key, followed
by its value if a fact gave it, else by `<unk>` (`k17 v17.5`, `k20 <unk>`). Each document draws one value for a key; a
quarter of the keys have none. So only the fact tells the answer. Generators are seeded.

Legend: N rows · T tokens of a row · Q queries of a row.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anchorline.files import replace_file
from benchmarks.experiment.spec import FactsConfig, StageConfig
from torchtrain.data.packing import random_stream

_SPECIAL = BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
_UNKNOWN = _SPECIAL.index(UNKNOWN)
_SUCCESSORS = 4  # of each filler word
_CHAIN, _DOCUMENTS, _ROWS = range(3)  # what a random stream is for
_SPACING = 4  # tokens between two queries of a row


@dataclass(frozen=True)
class RecallRows:
    """Rows of one document each, and the places of their questions."""

    input_ids: np.ndarray  # int64 [N, T]
    queries: np.ndarray  # int64 [N, Q], the key whose value comes next
    distances: np.ndarray  # int64 [N, Q], tokens since the fact, which occurs there once


def vocabulary(facts: FactsConfig) -> list[str]:
    """Return every word by its token id."""
    filler, keys = ([f"{kind}{n}" for n in range(words)] for kind, words in (("f", facts.filler), ("k", facts.keys)))
    values = [f"v{key}.{n}" for key in range(facts.keys) for n in range(facts.values)]
    return [*_SPECIAL, *filler, *keys, *values]


def write_documents(facts: FactsConfig, stage: StageConfig, number: int, path: Path) -> None:
    """Write a stage's documents, a line of JSON each.

    Args:
        facts: what the documents are made of.
        stage: the lengths of the documents, and the number of all tokens.
        number: of the stage; each stage draws other documents.
        path: the file.
    """
    random, words = random_stream(facts.seed, _DOCUMENTS, number), np.array(vocabulary(facts))
    chain, low, high = _chain(facts), np.log(stage.documents[0]), np.log(stage.documents[1] + 1)
    lines, left = [], stage.corpus_tokens
    while left > 0:
        full = random.random() < stage.full_share
        length = stage.row_tokens - 1 if full else int(np.exp(random.uniform(low, high)))
        lines.append(json.dumps({"text": " ".join(words[_document(facts, chain, random, length)])}) + "\n")
        left -= length
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(lines).encode())


def make_rows(facts: FactsConfig, tokens: int, distances: Sequence[int], rows: int, each: int) -> RecallRows:
    """Return rows that end in questions, `each` of every distance, in an order that is drawn.

    Args:
        facts: what the rows are made of.
        tokens: T.
        distances: from a question to its fact, which is the one earlier word about its key; multiples of 4.
        rows: N.
        each: questions of one distance in a row.
    """
    slots = len(distances) * each
    first = tokens - slots * _SPACING
    random, chain = random_stream(facts.seed, _ROWS, tokens), _chain(facts)
    made = [_row(facts, chain, random, tokens, first, sorted(distances), each) for _ in range(rows)]
    ids, queries, asked = (np.array(column, dtype=np.int64) for column in zip(*made, strict=True))
    return RecallRows(ids, queries, asked)


def _row(
    facts: FactsConfig,
    chain: np.ndarray,
    random: np.random.Generator,
    tokens: int,
    first: int,
    distances: Sequence[int],
    each: int,
) -> tuple[np.ndarray, list[int], list[int]]:
    keys = random.permutation(facts.keys)
    values = random.integers(facts.values, size=facts.keys)
    free, asked = list(range(first, tokens, _SPACING)), dict[int, int]()
    for distance in distances:  # the shortest first: its fact must come before all queries
        able = [place for place in free if place - distance < first]
        for place in random.choice(able, each, replace=False).tolist():
            free.remove(place)
            asked[place] = distance
    planted = dict[int, list[int]]()
    for number, (place, distance) in enumerate(asked.items()):
        key, value = _words_of(facts, int(keys[number]), int(values[number]))
        planted |= {place - 1: [key, value], place - 1 - distance: [value]}  # the document begins after BOS
    document = _document(facts, chain, random, tokens - 1, planted)
    places = sorted(asked)
    return np.concatenate([[0], document]), places, [asked[place] for place in places]


def _document(
    facts: FactsConfig,
    chain: np.ndarray,
    random: np.random.Generator,
    length: int,
    planted: Mapping[int, list[int]] = {},
) -> np.ndarray:
    """Return token ids [length]. `planted` holds words by their places; nothing else is about their keys."""
    taken = {words[0] for words in planted.values()}
    keys = [of for of in random.permutation(facts.keys).tolist() if _words_of(facts, of, 0)[0] not in taken]
    absent, unused = keys[: len(keys) // 4], keys[len(keys) // 4 :]
    values = random.integers(facts.values, size=facts.keys).tolist()
    drawn = random.random((length, 3)).tolist()
    ids, known, filler = list[int](), list[int](), int(random.integers(facts.filler))
    while len(ids) < length:
        place = len(ids)
        is_fact, kind, which = drawn[place]
        if place in planted:
            ids += planted[place]
        elif is_fact < facts.fact_share and kind < facts.new_share and unused:
            known.append(unused.pop())
            ids.append(_words_of(facts, known[-1], values[known[-1]])[1])
        elif is_fact < facts.fact_share and place + 1 not in planted and (known or absent):
            is_absent = not known or (kind > 1 - facts.absent_share and bool(absent))
            among = absent if is_absent else known
            of = among[int(which * len(among))]
            key, value = _words_of(facts, of, values[of])
            ids += [key, _UNKNOWN if is_absent else value]
        else:
            filler = int(chain[filler, int(which * _SUCCESSORS)])
            ids.append(len(_SPECIAL) + filler)
    return np.array(ids[:length])


def _words_of(facts: FactsConfig, key: int, value: int) -> tuple[int, int]:
    """Return the token ids of a key and of one of its values."""
    first = len(_SPECIAL) + facts.filler
    return first + key, first + facts.keys + key * facts.values + value


def _chain(facts: FactsConfig) -> np.ndarray:
    """Return what may follow each filler word, int [filler, 4]."""
    random = random_stream(facts.seed, _CHAIN)
    return np.array([random.choice(facts.filler, _SUCCESSORS, replace=False) for _ in range(facts.filler)])
