"""Experiments over shifts and lengths: their cells, and the records that they make."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from ropestudy import schema
from ropestudy.cells import (
    ERROR,
    SHIFT,
    TRUTH,
    Cell,
    CellResult,
    NamedPair,
    Question,
    RunAt,
    RunsOf,
    difference_of,
    per_sequence,
)
from ropestudy.compute.conditions import EXACT, condition
from ropestudy.compute.measures import columns
from ropestudy.schema import AnyRecord, Mode
from ropestudy.spec import Contestant, LengthsConfig, ShiftPairsConfig

OWN = "own"  # the name of the stream of the condition that is looked at


def shift_pairs(section: ShiftPairsConfig) -> Iterator[Question]:
    """Many pairs of shifts, of each contestant in each mode."""
    return (_shift_pairs(section, *one) for one in product(section.contestants, section.modes))


def lengths(section: LengthsConfig) -> Iterator[Question]:
    """One pair of shifts at many lengths, and the error against float64 there."""
    return (_lengths(section, *one) for one in product(section.contestants, section.modes))


def _shift_pairs(section: ShiftPairsConfig, contestant: Contestant, mode: Mode) -> Question:
    sequences = section.sequences
    if mode == "propagated" and section.propagated_sequences is not None:
        sequences = min(sequences, section.propagated_sequences)
    # Rising, so that 0, where it is one of them, is the shift that feeds every layer in `local`.
    own = RunsOf(OWN, condition(contestant.condition), tuple(section.all_shifts(mode)))
    first = (0, section.d2)
    pairs = tuple(
        NamedPair(_between(a, b), RunAt(OWN, a), RunAt(OWN, b), mode, keep_columns=(a, b) == first)
        for a, b in section.pairs(mode)
    )

    def make(found: list[CellResult]) -> list[AnyRecord]:
        about = _about(contestant, section.tokens, len(found), mode)
        differences = {(a, b): difference_of(found, _between(a, b)) for a, b in section.pairs(mode)}
        together = [schema.PairDifference(d1=a, d2=b, difference=one) for (a, b), one in differences.items()]
        records: list[AnyRecord] = [schema.ShiftPairs(**about, pairs=together)]
        if first in differences:
            by_token = columns([result.samples[_between(*first)] for result in found])
            shown = differences[first]
            records.append(schema.PerToken(**about, d1=0, d2=section.d2, difference=shown, columns=by_token))
        return records

    return Question(
        per_sequence(Cell("shift_pairs", contestant.model, 0, section.tokens, (own,), pairs), sequences), make
    )


def _lengths(section: LengthsConfig, contestant: Contestant, mode: Mode) -> Question:
    d1, d2, exact = section.d1, section.d2, contestant.condition == EXACT.name
    streams = [RunsOf(OWN, condition(contestant.condition), (d1, d2))]
    pairs = [NamedPair(SHIFT, RunAt(OWN, d1), RunAt(OWN, d2), mode)]
    if not exact:
        streams.append(RunsOf(TRUTH, EXACT, (d1,)))
        pairs.append(NamedPair(ERROR, RunAt(OWN, d1), RunAt(TRUTH, d1), mode))
    cells = []
    for tokens in section.lengths:
        cell = Cell("lengths", contestant.model, 0, tokens, tuple(streams), tuple(pairs))
        cells += per_sequence(cell, section.sequences)

    def make(found: list[CellResult]) -> list[AnyRecord]:
        points = []
        for place, tokens in enumerate(section.lengths):
            own = found[place * section.sequences : (place + 1) * section.sequences]
            error = None if exact else difference_of(own, ERROR)
            shift = difference_of(own, SHIFT)
            points.append(schema.LengthPoint(tokens=tokens, sequences=len(own), shift=shift, error=error))
        about = _about(contestant, max(section.lengths), section.sequences, mode)
        return [schema.ByLength(**about, d1=d1, d2=d2, points=points)]

    return Question(cells, make)


def _about(contestant: Contestant, tokens: int, sequences: int, mode: Mode) -> dict[str, Any]:
    who = {"model": contestant.model, "condition": contestant.condition}
    return {**who, "tokens": tokens, "sequences": sequences, "mode": mode}


def _between(d1: int, d2: int) -> str:
    return f"shift {d1} and {d2}"
