"""The experiments over shifts, lengths, positions and rotary pairs: the cells they ask for, the records that become of
them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ropestudy import schema
from ropestudy.cells import (
    ERROR,
    SHIFT,
    TRUTH,
    Cell,
    CellResult,
    Experiment,
    NamedPair,
    RunAt,
    RunsOf,
    difference_of,
    per_sequence,
)
from ropestudy.compute.conditions import EXACT, Condition, condition
from ropestudy.compute.measures import columns
from ropestudy.compute.methods import ROPE_SITES, Method
from ropestudy.schema import AnyRecord, Mode
from ropestudy.spec import Contestant, FrequencyConfig, LengthsConfig, OwnErrorConfig, ShiftPairsConfig

OWN = "own"  # the name of the stream of the condition that is looked at


class Trial(NamedTuple):
    """A contestant in a mode."""

    contestant: Contestant
    mode: Mode


class _Contest(Experiment[Trial]):
    """An experiment that asks the same of every contestant in every mode."""

    section: Any  # with contestants and modes

    def _questions(self) -> Iterator[Trial]:
        for contestant in self.section.contestants:
            for mode in self.section.modes:
                yield Trial(contestant, mode)


@dataclass(frozen=True)
class ShiftPairsExperiment(_Contest):
    """Many pairs of shifts, of each contestant in each mode."""

    section: ShiftPairsConfig
    name = "shift_pairs"

    def _cells(self, question: Trial) -> list[Cell]:
        section, mode = self.section, question.mode
        sequences = section.sequences
        if mode == "propagated" and section.propagated_sequences is not None:
            sequences = min(sequences, section.propagated_sequences)
        # Rising, so that 0, where it is one of them, is the shift that feeds every layer in `local`.
        own = RunsOf(OWN, condition(question.contestant.condition), tuple(section.all_shifts(mode)))
        pairs = tuple(
            NamedPair(_between(a, b), RunAt(OWN, a), RunAt(OWN, b), mode, keep_columns=(a, b) == (0, section.d2))
            for a, b in section.pairs(mode)
        )
        return per_sequence(Cell(self.name, question.contestant.model, 0, section.tokens, (own,), pairs), sequences)

    def _records(self, question: Trial, results: Mapping[Cell, CellResult]) -> list[AnyRecord]:
        section, mode = self.section, question.mode
        found = [results[cell] for cell in self._cells(question)]
        about: dict[str, Any] = {
            "model": question.contestant.model,
            "condition": question.contestant.condition,
            "tokens": section.tokens,
            "sequences": len(found),
            "mode": mode,
        }
        differences = {(a, b): difference_of(found, _between(a, b)) for a, b in section.pairs(mode)}
        pairs = [schema.PairDifference(d1=a, d2=b, difference=one) for (a, b), one in differences.items()]
        records: list[AnyRecord] = [schema.ShiftPairs(**about, pairs=pairs)]
        if (shown := differences.get((0, section.d2))) is not None:
            by_token = columns([result.samples[_between(0, section.d2)] for result in found])
            records.append(schema.PerToken(**about, d1=0, d2=section.d2, difference=shown, columns=by_token))
        return records


@dataclass(frozen=True)
class Lengths(_Contest):
    """One pair of shifts at many lengths, and the error against float64 there."""

    section: LengthsConfig
    name = "lengths"

    def _cells(self, question: Trial) -> list[Cell]:
        return [cell for tokens in self.section.lengths for cell in self._cells_of(question, tokens)]

    def _cells_of(self, question: Trial, tokens: int) -> list[Cell]:
        section, contestant = self.section, question.contestant
        first = RunAt(OWN, section.d1)
        streams = [RunsOf(OWN, condition(contestant.condition), (section.d1, section.d2))]
        pairs = [NamedPair(SHIFT, first, RunAt(OWN, section.d2), question.mode, keep_columns=True)]
        if not _is_exact(contestant):
            streams.append(RunsOf(TRUTH, EXACT, (section.d1,)))
            pairs.append(NamedPair(ERROR, first, RunAt(TRUTH, section.d1), question.mode))
        cell = Cell(self.name, contestant.model, 0, tokens, tuple(streams), tuple(pairs))
        return per_sequence(cell, section.sequences)

    def _records(self, question: Trial, results: Mapping[Cell, CellResult]) -> list[schema.ByLength]:
        section, (contestant, mode) = self.section, question
        record = schema.ByLength(
            model=contestant.model,
            condition=contestant.condition,
            tokens=max(section.lengths),
            sequences=section.sequences,
            mode=mode,
            d1=section.d1,
            d2=section.d2,
            points=[
                self._point(contestant, tokens, [results[cell] for cell in self._cells_of(question, tokens)])
                for tokens in section.lengths
            ],
        )
        return [record]

    def _point(self, contestant: Contestant, tokens: int, found: list[CellResult]) -> schema.LengthPoint:
        shown = columns([result.samples[SHIFT] for result in found])
        chosen = sorted({j for j in (*self.section.columns, tokens // 2, tokens - 1) if j < tokens})
        return schema.LengthPoint(
            tokens=tokens,
            sequences=len(found),
            shift=difference_of(found, SHIFT),
            error=None if _is_exact(contestant) else difference_of(found, ERROR),
            columns={j: shown.d_logit[j] for j in chosen},
            columns_d={j: shown.d[j] for j in chosen},
        )


@dataclass(frozen=True)
class OwnErrorExperiment(_Contest):
    """Each shift's distance from float64, and from the condition's own shift 0."""

    section: OwnErrorConfig
    name = "own_error"

    def _cells(self, question: Trial) -> list[Cell]:
        section, (contestant, mode), shifts = self.section, question, self.section.all_shifts()
        # In exact arithmetic every shift is the same function: float64 at shift 0 is the truth of them all.
        streams = (RunsOf(OWN, condition(contestant.condition), tuple(shifts)), RunsOf(TRUTH, EXACT, (0,)))
        errors = [NamedPair(_error_at(shift), RunAt(OWN, shift), RunAt(TRUTH, 0), mode) for shift in shifts]
        from_zero = [NamedPair(_between(0, shift), RunAt(OWN, 0), RunAt(OWN, shift), mode) for shift in shifts if shift]
        cell = Cell(self.name, contestant.model, 0, section.tokens, streams, (*errors, *from_zero))
        return per_sequence(cell, section.sequences)

    def _records(self, question: Trial, results: Mapping[Cell, CellResult]) -> list[schema.OwnError]:
        section = self.section
        found = [results[cell] for cell in self._cells(question)]
        points = [
            schema.OwnErrorPoint(
                shift=shift,
                error=difference_of(found, _error_at(shift)),
                from_zero=difference_of(found, _between(0, shift)) if shift else None,
            )
            for shift in section.all_shifts()
        ]
        record = schema.OwnError(
            model=question.contestant.model,
            condition=question.contestant.condition,
            tokens=section.tokens,
            sequences=section.sequences,
            mode=question.mode,
            points=points,
        )
        return [record]


@dataclass(frozen=True)
class Frequency(Experiment[str]):
    """Rotary pairs, rounded group by group. wavelengths: of each rotary pair, in tokens."""

    section: FrequencyConfig
    wavelengths: tuple[float, ...]
    name = "frequency"

    def _questions(self) -> list[str]:
        return self.section.conditions

    def _cells(self, question: str) -> list[Cell]:
        section = self.section
        # Of the base, RoPE's roundings and nothing else: what the rest of the model rounds would hide a group's share.
        rope_alone = condition(question).rounding.only(*ROPE_SITES).replace(carrier="float64", normalise="before_pv")
        streams, pairs = [RunsOf(TRUTH, EXACT, (section.d1,))], []
        for ends in self._groups():
            name = _rotary(ends)
            alone = Condition(f"{question}, {name}", rope_alone, Method(pairs=ends), base=question)
            streams.append(RunsOf(name, alone, (section.d1, section.d2)))
            first, second, truth = RunAt(name, section.d1), RunAt(name, section.d2), RunAt(TRUTH, section.d1)
            pairs.append(NamedPair(f"{name}: {SHIFT}", first, second, section.mode))
            pairs.append(NamedPair(f"{name}: {ERROR}", first, truth, section.mode))
        cell = Cell(self.name, "pretrained", 0, section.tokens, tuple(streams), tuple(pairs))
        return per_sequence(cell, section.sequences)

    def _groups(self) -> list[tuple[int, int]]:
        """Return the first and the last rotary pair of each group."""
        pairs = len(self.wavelengths)
        count = min(self.section.groups, pairs)
        edges = [round(i * pairs / count) for i in range(count + 1)]
        return [(first, behind - 1) for first, behind in pairwise(edges)]

    def _records(self, question: str, results: Mapping[Cell, CellResult]) -> list[schema.ByFrequency]:
        section = self.section
        found = [results[cell] for cell in self._cells(question)]
        groups = [
            schema.PairGroup(
                first=first,
                last=last,
                wavelengths=(self.wavelengths[first], self.wavelengths[last]),
                shift=difference_of(found, f"{_rotary((first, last))}: {SHIFT}"),
                error=difference_of(found, f"{_rotary((first, last))}: {ERROR}"),
            )
            for first, last in self._groups()
        ]
        record = schema.ByFrequency(
            model="pretrained",
            condition=question,
            tokens=section.tokens,
            sequences=section.sequences,
            mode=section.mode,
            d1=section.d1,
            d2=section.d2,
            groups=groups,
        )
        return [record]


def _is_exact(contestant: Contestant) -> bool:
    return contestant.condition == EXACT.name


def _between(d1: int, d2: int) -> str:
    return f"shift {d1} and {d2}"


def _error_at(shift: int) -> str:
    return f"error at {shift}"


def _rotary(ends: tuple[int, int]) -> str:
    return f"pairs {ends[0]}-{ends[1]}"
