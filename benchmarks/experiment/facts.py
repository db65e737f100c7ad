"""Documents of facts and questions: only the fact tells the answer.

A document holds filler words (`f3`), facts (`v17.5`: key 17 has value 5) and questions. A question is a key, followed
by its value if a fact gave it, else by `<unk>` (`k17 v17.5`, `k20 <unk>`). A document is about some of the keys or all,
and draws one value for each; a quarter of them have none.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.experiment.spec import FactsConfig
from benchmarks.experiment.words import FIRST_FILLER, SPECIAL, SUCCESSORS, UNKNOWN, chain_of

_UNKNOWN = SPECIAL.index(UNKNOWN)
_SPACING = 4  # tokens between two queries of a row


def draw_row(
    facts: FactsConfig, random: np.random.Generator, length: int, distances: Sequence[int], each: int
) -> tuple[np.ndarray, list[tuple[int, int, list[int]]]]:
    """Return a document that ends in questions, `each` of every distance, in an order that is drawn.

    Returns token ids [length]; place, distance and the one right answer of each question. The fact is the one earlier
    word about its key. Distances are multiples of 4.
    """
    first = length - len(distances) * each * _SPACING
    keys = random.permutation(facts.keys)
    values = random.integers(facts.values, size=facts.keys)
    free, asked = list(range(first, length, _SPACING)), dict[int, int]()
    for distance in sorted(distances):  # the shortest first: its fact must come before all queries
        able = [place for place in free if place - distance < first]
        for place in random.choice(able, each, replace=False).tolist():
            free.remove(place)
            asked[place] = distance
    planted, queries = dict[int, list[int]](), list[tuple[int, int, list[int]]]()
    for key_number, (place, distance) in zip(keys.tolist(), asked.items(), strict=False):
        key, value = _words_of(facts, key_number, int(values[key_number]))
        planted |= {place: [key, value], place + 1 - distance: [value]}
        queries.append((place, distance, [value]))
    return draw(facts, chain_of(facts), random, length, keys, planted), queries


def draw(
    facts: FactsConfig,
    chain: np.ndarray,
    random: np.random.Generator,
    length: int,
    keys: np.ndarray | None = None,
    planted: Mapping[int, list[int]] = {},
) -> np.ndarray:
    """Return token ids [length] that open with filler.

    keys: int, what the document is about; default: all.
    planted: words by their places; nothing else is about their keys.
    """
    keys = np.arange(facts.keys) if keys is None else keys
    taken = {words[0] for words in planted.values()}
    own = [of for of in random.permutation(keys).tolist() if _words_of(facts, of, 0)[0] not in taken]
    absent, unused = own[: len(own) // 4], own[len(own) // 4 :]
    values = random.integers(facts.values, size=facts.keys).tolist()
    drawn = random.random((length, 3)).tolist()
    filler = int(random.integers(facts.filler))
    ids, known = [FIRST_FILLER + filler], list[int]()
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
            filler = int(chain[filler, int(which * SUCCESSORS)])
            ids.append(FIRST_FILLER + filler)
    return np.array(ids[:length])


def _words_of(facts: FactsConfig, key: int, value: int) -> tuple[int, int]:
    first = FIRST_FILLER + facts.filler
    return first + key, first + facts.keys + key * facts.values + value
