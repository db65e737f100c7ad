"""Synthetic documents: key-value facts in Markov filler, and the rows in which recall is measured.

A document is words: filler (`f3`), and facts, a key and its value (`k17 v5`). A key has one value in a document, drawn
for that document, so its second value can only be told from its first. Everything is drawn by seeded generators.

Legend: N rows · T tokens of a row · Q queries of a row.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from anchorline.files import replace_file
from torchtrain.data.packing import random_stream
from torchtrain.experiment.spec import FactsConfig, StageConfig

BOS, EOS, UNKNOWN = "<s>", "</s>", "<unk>"
_SUCCESSORS = 4  # of each filler word
_CHAIN, _DOCUMENTS, _ROWS = range(3)  # what a random stream is for
_SPACING = 4  # tokens between two queries of a row


@dataclass(frozen=True)
class RecallRows:
    """Rows of one document each, and where they ask for a value again."""

    input_ids: np.ndarray  # int64 [N, T]
    queries: np.ndarray  # int64 [N, Q], the key whose value comes next
    distances: np.ndarray  # int64 [N, Q], tokens since the same key stood there, once


def vocabulary(facts: FactsConfig) -> list[str]:
    """Return every word by its token id."""
    words = [f"{kind}{n}" for kind, n_words in zip("fkv", facts.words, strict=True) for n in range(n_words)]
    return [BOS, EOS, UNKNOWN, *words]


def write_documents(facts: FactsConfig, stage: StageConfig, number: int, path: Path) -> None:
    """Write a stage's documents, a line of JSON each.

    Args:
        facts: what they are made of.
        stage: their lengths, and how many tokens in all.
        number: of the stage, which draws other documents than another.
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
    """Return rows that end in queries, `each` of every distance, in drawn order.

    Args:
        facts: what they are made of.
        tokens: T.
        distances: from a query to the one earlier place of its key; each a multiple of 4.
        rows: N.
        each: queries of a distance in a row.
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
    for distance in distances:  # the shortest first: its key must stand in front of all queries
        able = [place for place in free if place - distance < first]
        for place in random.choice(able, each, replace=False).tolist():
            free.remove(place)
            asked[place] = distance
    planted = dict[int, tuple[int, int]]()
    for number, (place, distance) in enumerate(asked.items()):
        fact = int(keys[number]), int(values[number])
        planted |= {place - 1: fact, place - 1 - distance: fact}  # the document begins behind BOS
    document = _document(facts, chain, random, tokens - 1, planted)
    places = sorted(asked)
    return np.concatenate([[0], document]), places, [asked[place] for place in places]


def _document(
    facts: FactsConfig,
    chain: np.ndarray,
    random: np.random.Generator,
    length: int,
    planted: Mapping[int, tuple[int, int]] = {},
) -> np.ndarray:
    """Return token ids [length]. `planted` holds facts by their places; no other fact has their keys."""
    filler, key, value = np.cumsum([3, *facts.words])[:3].tolist()
    taken = {of for of, _ in planted.values()}
    new: Iterator[int] = (of for of in random.permutation(facts.keys).tolist() if of not in taken)
    values = random.integers(facts.values, size=facts.keys).tolist()
    drawn = random.random((length, 3)).tolist()
    ids, told, word = list[int](), list[int](), int(random.integers(facts.filler))
    while len(ids) < length:
        place = len(ids)
        is_fact, is_new, which = drawn[place]
        if place in planted:
            of, its = planted[place]
            ids += [key + of, value + its]
            continue
        if is_fact < facts.fact_share and place + 1 not in planted and place + 1 < length:
            of = next(new, None) if is_new < facts.new_share or not told else told[int(which * len(told))]
            if of is not None:
                if is_new < facts.new_share or not told:
                    told.append(of)
                ids += [key + of, value + values[of]]
                continue
        word = int(chain[word, int(which * _SUCCESSORS)])
        ids.append(filler + word)
    return np.array(ids[:length])


def _chain(facts: FactsConfig) -> np.ndarray:
    """Return what may follow each filler word, int [filler, 4]."""
    random = random_stream(facts.seed, _CHAIN)
    return np.array([random.choice(facts.filler, _SUCCESSORS, replace=False) for _ in range(facts.filler)])
