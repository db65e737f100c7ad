"""Documents that ask what stood some tokens back: only the distance tells the answer.

A question is one word that names a distance d (`back60`). The answer is drawn from the M filler words that stood d to
d + M - 1 tokens before it, each as likely. So the best a model can do is to give each of these its share; attention
must spread evenly over M places that nothing but their distance marks.
"""

from collections.abc import Sequence

import numpy as np

from benchmarks.experiment.spec import OffsetsConfig
from benchmarks.experiment.words import FIRST_FILLER, SUCCESSORS, chain_of

Query = tuple[int, int, list[int]]  # place of the question, distance, right answers


def draw(
    offsets: OffsetsConfig, chain: np.ndarray, random: np.random.Generator, length: int
) -> tuple[np.ndarray, list[Query]]:
    """Return token ids [length] that open with filler, and the questions among them."""
    first_question = FIRST_FILLER + offsets.filler
    drawn, filler = random.random((length, 4)).tolist(), int(random.integers(offsets.filler))
    ids, queries = [FIRST_FILLER + filler], list[Query]()
    while len(ids) < length:
        place = len(ids)
        is_question, which, following, answer = drawn[place]
        able = list[tuple[int, list[int]]]()
        if is_question < offsets.question_share and place + 1 < length:
            for number, distance in enumerate(offsets.distances):
                end = place + 2 - distance  # behind the nearest of the places asked for
                among = ids[max(0, end - offsets.spread) : max(0, end)]
                if len(among) == offsets.spread and max(among) < first_question:
                    able.append((number, among))
        if able:
            number, among = able[int(which * len(able))]
            queries.append((place, offsets.distances[number], among))
            filler = among[int(answer * offsets.spread)] - FIRST_FILLER
            ids += [first_question + number, FIRST_FILLER + filler]
        else:
            filler = int(chain[filler, int(following * SUCCESSORS)])
            ids.append(FIRST_FILLER + filler)
    return np.array(ids), queries


def draw_row(
    offsets: OffsetsConfig, random: np.random.Generator, length: int, distances: Sequence[int], each: int
) -> tuple[np.ndarray, list[Query]]:
    """Return a document that asks for each distance at least `each` times in its second half, and those questions."""
    chain = chain_of(offsets)
    while True:
        ids, queries = draw(offsets, chain, random, length)
        asked = [query for query in queries if query[0] >= length // 2 and query[1] in distances]
        if all(sum(distance == query[1] for query in asked) >= each for distance in distances):
            return ids, asked
