"""The experiments whose rows are `schema.Score`: factorial, remedies, controls, masks.

Every row is asked the same: how far are shifts d1 and d2 apart, how far is shift d1 from float64, and what do the
outputs make of both. A few conditions share a cell, and with it one float64 run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ropestudy import schema
from ropestudy.cells import (
    ERROR,
    SHIFT,
    TRUTH,
    Cell,
    CellResult,
    NamedDivergence,
    NamedPair,
    Question,
    RunAt,
    RunsOf,
    difference_of,
    divergence_of,
    per_sequence,
)
from ropestudy.compute.conditions import (
    EXACT,
    Condition,
    before_and_after,
    condition,
    off_alone,
    off_together,
    on_alone,
    remedies,
)
from ropestudy.compute.methods import Method
from ropestudy.schema import AnyRecord, Mode
from ropestudy.spec import ControlsConfig, FactorialConfig, MasksConfig, RemediesConfig, RowPositions

SHARING = 6  # conditions in a cell
MODES: tuple[Mode, ...] = ("local", "propagated")
OUTPUTS = "outputs"  # the name of a divergence


@dataclass(frozen=True)
class Asked:
    """A row of the table. `partner`: the other end of the shift, in place of the condition at d2."""

    group: schema.Group
    condition: Condition
    model: str = "pretrained"
    mask: str = "full"
    partner: Condition | None = None

    def name(self, what: str, mode: Mode | None = None) -> str:
        """Return the name of one of its pairs or, without a mode, of its divergences."""
        return f"{self.condition.name}: {what}" + (f", {mode}" if mode else "")


def factorial(section: FactorialConfig) -> Iterator[Question]:
    """Every rounding site alone, and every site left out of each preset."""
    rows = [Asked("baseline", EXACT), *(Asked("on_alone", one) for one in on_alone(section.format))]
    for base in section.off_from:
        rows.append(Asked("baseline", replace(condition(base), base=base)))
        rows += [Asked("off_alone", one) for one in (*off_alone(base), *off_together(base))]
    return _score("factorial", section, rows)


def remedy(section: RemediesConfig) -> Iterator[Question]:
    """Each preset, and what is done against it."""
    rows = []
    for base in section.bases:
        rows.append(Asked("baseline", replace(condition(base), base=base)))
        for one in remedies(base):
            if section.only is None or one.name.removeprefix(f"{base}: ") in section.only:
                rows.append(Asked("remedy", one))
    return _score("remedies", section, rows)


def controls(section: ControlsConfig, seed: int) -> Iterator[Question]:
    """What must hold, or must not, if rounding is the cause. seed: of the random phases."""
    base, still = condition(section.base), Method(angles="float64")
    rows = [Asked("baseline", replace(base, base=base.name))]
    rows += [Asked("control", one) for one in before_and_after(section.base)]
    rows += [Asked("control", condition(name)) for name in ("fp32", "fp32_angles64")]
    about = "a constant random phase per rotary pair, against none: as neutral as a shift"
    for start in (EXACT, base):
        without = Condition(f"{start.name}: float64 angles", start.rounding, still)
        for draw in range(section.phases):
            method = replace(still, phases=seed + draw)
            phases = Condition(f"{start.name}: random phases {draw}", start.rounding, method, about, start.name)
            rows.append(Asked("control", phases, partner=without))
    rows += [Asked("control", condition(name), model) for model in section.models for name in section.model_conditions]
    return _score("controls", section, rows)


def masks(section: MasksConfig) -> Iterator[Question]:
    """Packed documents under every mask; and the same tokens with and without reset positions."""
    conditions = [condition(name) for name in section.conditions]
    rows = [Asked("mask", replace(one, base=one.name), mask=mask) for mask in section.masks for one in conditions]
    yield from _score("masks", section, rows, section.documents)
    if {"intra", "intra_reset"} <= set(section.masks):
        yield from (_reset(section, name) for name in section.conditions)


def _score(name: str, section: Any, rows: Iterable[Asked], documents: int | None = None) -> Iterator[Question]:
    """Yield cells that rows of one model and mask share, at each of the section's positions."""
    shared: dict[tuple[str, str], list[Asked]] = {}
    for row in rows:
        shared.setdefault((row.model, row.mask), []).append(row)
    for positions in section.positions:
        for together in shared.values():
            for start in range(0, len(together), SHARING):
                yield _score_rows(name, section, together[start : start + SHARING], positions, documents)


def _score_rows(name: str, section: Any, rows: list[Asked], at: RowPositions, documents: int | None) -> Question:
    truth = RunAt(TRUTH, at.d1)
    streams, pairs, divergences = [RunsOf(TRUTH, EXACT, (at.d1,))], [], []
    # A condition may be asked for twice, such as a baseline that is a control too: it is computed once.
    for one in {row.condition.name: row for row in rows}.values():
        own = RunAt(one.condition.name, at.d1)
        if one.partner is None:
            streams.append(RunsOf(own.stream, one.condition, (at.d1, at.d2)))
            a, b = own, RunAt(own.stream, at.d2)
        else:
            a, b = RunAt(f"{own.stream}, partner", at.d1), own
            streams += [RunsOf(a.stream, one.partner, (at.d1,)), RunsOf(own.stream, one.condition, (at.d1,))]
        pairs += [NamedPair(one.name(SHIFT, mode), a, b, mode) for mode in MODES]
        pairs += [NamedPair(one.name(ERROR, mode), own, truth, mode) for mode in MODES]
        divergences += [NamedDivergence(one.name(SHIFT), a, b), NamedDivergence(one.name(ERROR), truth, own)]
    cell = Cell(
        name, rows[0].model, 0, section.tokens, tuple(streams), tuple(pairs), tuple(divergences),
        mask=rows[0].mask, documents=documents, gap=at.gap,
    )  # fmt: skip

    def record(row: Asked, found: list[CellResult]) -> schema.Score:
        return schema.Score(
            model=row.model,
            condition=row.condition.name,
            tokens=section.tokens,
            sequences=section.sequences,
            group=row.group,
            base=row.condition.base,
            site=row.condition.site,
            text="first",
            mask=row.mask,
            about=row.condition.about,
            d1=at.d1,
            d2=at.d1 if row.partner is not None else at.d2,
            gap=at.gap,
            shift={mode: difference_of(found, row.name(SHIFT, mode)) for mode in MODES},
            error={mode: difference_of(found, row.name(ERROR, mode)) for mode in MODES},
            kl_shift=divergence_of(found, row.name(SHIFT)),
            kl_error=divergence_of(found, row.name(ERROR)),
        )

    return Question(per_sequence(cell, section.sequences), lambda found: [record(row, found) for row in rows])


def _reset(section: MasksConfig, name: str) -> Question:
    a, b = "intra", "intra_reset"
    ends = RunAt(a, 0), RunAt(b, 0)
    streams = tuple(RunsOf(mask, condition(name), (0,), mask) for mask in (a, b))
    pairs = tuple(NamedPair(mode, *ends, mode) for mode in MODES)
    cell = Cell(
        "masks", "pretrained", 0, section.tokens, streams, pairs, (NamedDivergence(OUTPUTS, *ends),),
        mask=a, documents=section.documents,
    )  # fmt: skip

    def make(found: list[CellResult]) -> list[AnyRecord]:
        return [
            schema.MaskPair(
                model="pretrained",
                condition=name,
                tokens=section.tokens,
                sequences=section.sequences,
                mode=mode,
                a=a,
                b=b,
                documents=list(found[0].lengths),
                difference=difference_of(found, mode),
                kl=divergence_of(found, OUTPUTS),
            )
            for mode in MODES
        ]

    return Question(per_sequence(cell, section.sequences), make)
