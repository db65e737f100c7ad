"""The experiments over shifts, lengths, positions and rotary pairs: the cells they ask for, the records that become of them."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ropestudy import schema
from ropestudy.cells import Cell, CellResult, Job, RunsOf, per_sequence
from ropestudy.conditions import EXACT, Condition, condition
from ropestudy.engine import Pair
from ropestudy.measures import columns, difference
from ropestudy.methods import ROPE_SITES, Method
from ropestudy.schema import Difference
from ropestudy.scores import score_jobs
from ropestudy.spec import (
    FrequencyConfig,
    LengthsConfig,
    OwnErrorConfig,
    ShiftPairsConfig,
    StudyConfig,
)


def jobs(config: StudyConfig, wavelengths: Sequence[float]) -> list[Job]:
    """Everything a study computes, experiment by experiment. wavelengths: of each rotary pair, in tokens."""
    found: list[Job] = []
    for name, section in config.experiments.items():
        if isinstance(section, ShiftPairsConfig):
            found += _shift_pairs(name, section)
        elif isinstance(section, LengthsConfig):
            found += _lengths(name, section)
        elif isinstance(section, OwnErrorConfig):
            found += _own_error(name, section)
        elif isinstance(section, FrequencyConfig):
            found += _frequency(name, section, wavelengths)
        else:
            found += score_jobs(name, section, config.seed)
    return found


def together(results: Sequence[CellResult], pair: int) -> Difference:
    """One pair over all sequences."""
    return difference([result.samples[pair] for result in results])


def _shift_pairs(name: str, section: ShiftPairsConfig) -> Iterator[Job]:
    for contestant in section.contestants:
        chosen = condition(contestant.condition)
        for mode in section.modes:
            sequences = section.sequences
            if mode == "propagated" and section.propagated_sequences is not None:
                sequences = min(sequences, section.propagated_sequences)
            shifts, ends = section.all_shifts(mode), section.pairs(mode)
            if 0 in shifts:  # run 0 feeds every layer in `local`
                shifts = [0, *(d for d in shifts if d != 0)]
            pairs = tuple(Pair((0, shifts.index(a)), (0, shifts.index(b)), mode) for a, b in ends)
            shown = (0, section.d2)
            keep = (ends.index(shown),) if shown in ends else ()
            cell = Cell(name, contestant.model, 0, section.tokens, (RunsOf(chosen, tuple(shifts)),), pairs, keep=keep)
            about = {
                "model": contestant.model,
                "condition": contestant.condition,
                "tokens": section.tokens,
                "sequences": sequences,
                "mode": mode,
            }

            def records(results: list[CellResult], ends: Any = ends, keep: Any = keep, about: Any = about) -> list[Any]:
                made: list[Any] = [
                    schema.ShiftPairs(
                        **about,
                        pairs=[
                            schema.PairDifference(d1=a, d2=b, difference=together(results, i))
                            for i, (a, b) in enumerate(ends)
                        ],
                    )
                ]
                for i in keep:
                    shown = columns([result.samples[i] for result in results])
                    d1, d2 = ends[i]
                    made.append(schema.PerToken(**about, d1=d1, d2=d2, difference=together(results, i), columns=shown))
                return made

            yield Job(per_sequence(cell, sequences), records)


def _lengths(name: str, section: LengthsConfig) -> Iterator[Job]:
    for contestant in section.contestants:
        chosen = condition(contestant.condition)
        exact = chosen.name == EXACT.name
        for mode in section.modes:
            streams = (RunsOf(chosen, (section.d1, section.d2)),)
            pairs = (Pair((0, 0), (0, 1), mode),)
            if not exact:
                streams += (RunsOf(EXACT, (section.d1,)),)
                pairs += (Pair((0, 0), (1, 0), mode),)
            cells = [
                one
                for tokens in section.lengths
                for one in per_sequence(
                    Cell(name, contestant.model, 0, tokens, streams, pairs, keep=(0,)), section.sequences
                )
            ]

            def records(
                results: list[CellResult], contestant: Any = contestant, mode: Any = mode, exact: bool = exact
            ) -> list[Any]:
                points = []
                for place, tokens in enumerate(section.lengths):
                    own = results[place * section.sequences : (place + 1) * section.sequences]
                    shown = columns([result.samples[0] for result in own])
                    chosen = sorted({j for j in (*section.columns, tokens // 2, tokens - 1) if j < tokens})
                    points.append(
                        schema.LengthPoint(
                            tokens=tokens,
                            sequences=len(own),
                            shift=together(own, 0),
                            error=None if exact else together(own, 1),
                            columns={j: shown.d_logit[j] for j in chosen},
                            columns_d={j: shown.d[j] for j in chosen},
                        )
                    )
                return [
                    schema.ByLength(
                        model=contestant.model,
                        condition=contestant.condition,
                        tokens=max(section.lengths),
                        sequences=section.sequences,
                        mode=mode,
                        d1=section.d1,
                        d2=section.d2,
                        points=points,
                    )
                ]

            yield Job(cells, records)


def _own_error(name: str, section: OwnErrorConfig) -> Iterator[Job]:
    shifts = section.all_shifts()
    for contestant in section.contestants:
        chosen = condition(contestant.condition)
        for mode in section.modes:
            # In exact arithmetic every shift is the same function: float64 at shift 0 is the truth of them all.
            streams = (RunsOf(chosen, tuple(shifts)), RunsOf(EXACT, (0,)))
            own = [Pair((0, i), (1, 0), mode) for i in range(len(shifts))]
            pairs = (*own, *(Pair((0, 0), (0, i), mode) for i in range(1, len(shifts))))
            cell = Cell(name, contestant.model, 0, section.tokens, streams, pairs)

            def records(results: list[CellResult], contestant: Any = contestant, mode: Any = mode) -> list[Any]:
                points = [
                    schema.OwnErrorPoint(
                        shift=shift,
                        error=together(results, i),
                        from_zero=together(results, len(shifts) + i - 1) if i else None,
                    )
                    for i, shift in enumerate(shifts)
                ]
                return [
                    schema.OwnError(
                        model=contestant.model,
                        condition=contestant.condition,
                        tokens=section.tokens,
                        sequences=section.sequences,
                        mode=mode,
                        points=points,
                    )
                ]

            yield Job(per_sequence(cell, section.sequences), records)


def _frequency(name: str, section: FrequencyConfig, wavelengths: Sequence[float]) -> Iterator[Job]:
    count = min(section.groups, len(wavelengths))
    edges = [round(i * len(wavelengths) / count) for i in range(count + 1)]
    groups = [(first, behind - 1) for first, behind in pairwise(edges)]
    for base in section.conditions:
        chosen = condition(base)
        # Of the base, RoPE's roundings and nothing else: what the rest of the model rounds would hide a group's share.
        rope_alone = chosen.rounding.only(*ROPE_SITES).replace(carrier="float64", normalise="before_pv")
        alone = [
            Condition(f"{base}, pairs {first}-{last}", rope_alone, Method(pairs=(first, last)), base=base)
            for first, last in groups
        ]
        streams = (RunsOf(EXACT, (section.d1,)), *(RunsOf(one, (section.d1, section.d2)) for one in alone))
        pairs = tuple(
            pair
            for i in range(1, len(streams))
            for pair in (Pair((i, 0), (i, 1), section.mode), Pair((i, 0), (0, 0), section.mode))
        )

        def records(results: list[CellResult], base: str = base) -> list[Any]:
            return [
                schema.ByFrequency(
                    model="pretrained",
                    condition=base,
                    tokens=section.tokens,
                    sequences=section.sequences,
                    mode=section.mode,
                    d1=section.d1,
                    d2=section.d2,
                    groups=[
                        schema.PairGroup(
                            first=first,
                            last=last,
                            wavelengths=(wavelengths[first], wavelengths[last]),
                            shift=together(results, 2 * i),
                            error=together(results, 2 * i + 1),
                        )
                        for i, (first, last) in enumerate(groups)
                    ],
                )
            ]

        cell = Cell(name, "pretrained", 0, section.tokens, streams, pairs)
        yield Job(per_sequence(cell, section.sequences), records)
