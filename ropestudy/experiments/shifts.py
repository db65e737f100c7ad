"""The experiments over shifts and lengths: many pairs of shifts, and one pair at many lengths."""

from collections.abc import Iterator
from itertools import product

from ropestudy.cells import Question
from ropestudy.compute.conditions import EXACT, condition
from ropestudy.compute.engine import Run
from ropestudy.experiments.attention import Comparison, Runs, make_question
from ropestudy.schema import Mode
from ropestudy.spec import D1, D2, LengthsConfig, ShiftPairsConfig

MODES: tuple[Mode, ...] = ("local", "propagated")


def shift_pairs(section: ShiftPairsConfig, seed: int) -> Iterator[Question]:
    """Many pairs of shifts, of each contestant in each mode."""
    for contestant, mode in product(section.contestants, MODES):
        sequences = section.sequences
        if mode == "propagated" and section.propagated_sequences is not None:
            sequences = min(sequences, section.propagated_sequences)
        # Rising, so that 0, where it is one of them, is the shift that feeds every layer in `local`.
        shifts, one = section.all_shifts(mode), condition(contestant.condition)
        runs = {shift: Run(0, place) for place, shift in enumerate(shifts)}
        comparisons = [
            Comparison("shift_pairs", one, "shift", a, b, runs[a], runs[b], (mode,), with_columns=(a, b) == (0, D2))
            for a, b in section.pairs(mode)
        ]
        streams = [Runs(one, tuple(shifts))]
        yield make_question("shift_pairs", contestant.model, section.tokens, sequences, streams, comparisons)


def lengths(section: LengthsConfig, seed: int) -> Iterator[Question]:
    """One pair of shifts at many lengths, and the error against float64 there."""
    for contestant, mode, tokens in product(section.contestants, section.modes, section.lengths):
        one = condition(contestant.condition)
        streams = [Runs(one, (D1, D2))]
        comparisons = [Comparison("lengths", one, "shift", D1, D2, Run(0, 0), Run(0, 1), (mode,))]
        if one != EXACT:
            streams.append(Runs(EXACT, (D1,)))
            comparisons.append(Comparison("lengths", one, "exact", D1, D1, Run(0, 0), Run(1, 0), (mode,)))
        yield make_question("lengths", contestant.model, tokens, section.sequences, streams, comparisons)
