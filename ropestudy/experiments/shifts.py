"""The experiments over shifts and lengths: many pairs of shifts, and one pair at many lengths."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from ropestudy import schema
from ropestudy.cells import AttentionCell, CellResult, Question, Runs, difference_of, per_sequence
from ropestudy.compute.conditions import EXACT, condition
from ropestudy.compute.engine import Pair, Run
from ropestudy.compute.measures import columns
from ropestudy.schema import AnyRecord, Mode
from ropestudy.spec import D1, D2, Contestant, LengthsConfig, ShiftPairsConfig

SHIFT, ERROR = "shift", "error"  # names of pairs: of two shifts, and against float64


def shift_pairs(section: ShiftPairsConfig, seed: int) -> Iterator[Question]:
    """Many pairs of shifts, of each contestant in each mode."""
    modes: tuple[Mode, ...] = ("local", "propagated")
    return (_shift_pairs(section, *one) for one in product(section.contestants, modes))


def lengths(section: LengthsConfig, seed: int) -> Iterator[Question]:
    """One pair of shifts at many lengths, and the error against float64 there."""
    return (_lengths(section, *one) for one in product(section.contestants, section.modes))


def _shift_pairs(section: ShiftPairsConfig, contestant: Contestant, mode: Mode) -> Question:
    sequences = section.sequences
    if mode == "propagated" and section.propagated_sequences is not None:
        sequences = min(sequences, section.propagated_sequences)
    # Rising, so that 0, where it is one of them, is the shift that feeds every layer in `local`.
    shifts = section.all_shifts(mode)
    runs = Runs(condition(contestant.condition), tuple(shifts))
    names = {(a, b): f"shift {a} and {b}" for a, b in section.pairs(mode)}
    pairs = {name: Pair(Run(0, shifts.index(a)), Run(0, shifts.index(b)), mode) for (a, b), name in names.items()}
    shown = names.get((0, D2))
    cell = AttentionCell("shift_pairs", contestant.model, section.tokens, (runs,), pairs, {}, columns_of=shown)

    def make(results: list[CellResult]) -> list[AnyRecord]:
        about = _about(contestant, section.tokens, len(results), mode)
        differences = {ends: difference_of(results, name) for ends, name in names.items()}
        together = [schema.PairDifference(d1=a, d2=b, difference=one) for (a, b), one in differences.items()]
        records: list[AnyRecord] = [schema.ShiftPairs(**about, pairs=together)]
        if shown is not None:
            by_token, whole = columns([result.samples[shown] for result in results]), differences[0, D2]
            records.append(schema.PerToken(**about, d1=0, d2=D2, difference=whole, columns=by_token))
        return records

    return Question(per_sequence(cell, sequences), make)


def _lengths(section: LengthsConfig, contestant: Contestant, mode: Mode) -> Question:
    exact = contestant.condition == EXACT.name
    streams = (Runs(condition(contestant.condition), (D1, D2)), *([] if exact else [Runs(EXACT, (D1,))]))
    pairs = {SHIFT: Pair(Run(0, 0), Run(0, 1), mode)}
    pairs |= {} if exact else {ERROR: Pair(Run(0, 0), Run(1, 0), mode)}
    cells = []
    for tokens in section.lengths:
        cell = AttentionCell("lengths", contestant.model, tokens, streams, pairs, {})
        cells += per_sequence(cell, section.sequences)

    def make(results: list[CellResult]) -> list[AnyRecord]:
        points = []
        for place, tokens in enumerate(section.lengths):
            own = results[place * section.sequences : (place + 1) * section.sequences]
            error = None if exact else difference_of(own, ERROR)
            shift = difference_of(own, SHIFT)
            points.append(schema.LengthPoint(tokens=tokens, sequences=len(own), shift=shift, error=error))
        about = _about(contestant, section.longest, section.sequences, mode)
        return [schema.ByLength(**about, d1=D1, d2=D2, points=points)]

    return Question(cells, make)


def _about(contestant: Contestant, tokens: int, sequences: int, mode: Mode) -> dict[str, Any]:
    who = {"model": contestant.model, "condition": contestant.condition}
    return {**who, "tokens": tokens, "sequences": sequences, "mode": mode}
