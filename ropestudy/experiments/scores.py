"""The experiments whose rows are `schema.Score`: factorial, remedies, controls, masks.

Each row answers three questions. How far apart are shifts d1 and d2? How far is shift d1 from float64? What do both
do to the outputs? A few conditions share a cell, and with it one float64 run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ropestudy import schema
from ropestudy.cells import AttentionCell, CellResult, Question, Runs, difference_of, divergence_of, per_sequence
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
from ropestudy.compute.engine import Pair, Run
from ropestudy.compute.methods import Method
from ropestudy.schema import AnyRecord, Mode
from ropestudy.spec import ControlsConfig, FactorialConfig, MasksConfig, RemediesConfig, RowPositions

SHARING = 6  # conditions in a cell
MODES: tuple[Mode, ...] = ("local", "propagated")
OUTPUTS = "outputs"  # the name of a divergence
CONTROLLED = "hf_eager_bf16"  # the preset that controls are made for

_Section = FactorialConfig | RemediesConfig | ControlsConfig | MasksConfig


@dataclass(frozen=True)
class Asked:
    """A row of the table. `partner`: the other end of the shift, in place of the condition at d2."""

    group: schema.Group
    condition: Condition
    model: str = "pretrained"
    mask: str = "full"
    partner: Condition | None = None

    def shift(self, mode: str = OUTPUTS) -> str:
        """Return the name of the pair of shifts in a mode, or of the divergence of their outputs."""
        return f"{self.condition.name}: shift, {mode}"

    def error(self, mode: str = OUTPUTS) -> str:
        """Return the name of the pair with float64 in a mode, or of the divergence of their outputs."""
        return f"{self.condition.name}: error, {mode}"


def factorial(section: FactorialConfig, seed: int) -> Iterator[Question]:
    """Every rounding site alone, and every site left out of each preset."""
    rows = [Asked("baseline", EXACT), *(Asked("on_alone", one) for one in on_alone())]
    for base in section.off_from:
        rows.append(Asked("baseline", replace(condition(base), base=base)))
        rows += [Asked("off_alone", one) for one in (*off_alone(base), *off_together(base))]
    return _score("factorial", section, rows)


def remedy(section: RemediesConfig, seed: int) -> Iterator[Question]:
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
    base, still = condition(CONTROLLED), Method(angles="float64")
    rows = [Asked("baseline", replace(base, base=base.name))]
    rows += [Asked("control", one) for one in before_and_after(CONTROLLED)]
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


def masks(section: MasksConfig, seed: int) -> Iterator[Question]:
    """Packed documents under every mask; and the same tokens with and without reset positions."""
    conditions = [condition(name) for name in section.conditions]
    variants = ("full", "intra", "intra_reset", "anchor")
    rows = [Asked("mask", replace(one, base=one.name), mask=mask) for mask in variants for one in conditions]
    yield from _score("masks", section, rows)
    yield from (_reset(section, name) for name in section.conditions)


def _score(name: str, section: _Section, rows: Iterable[Asked]) -> Iterator[Question]:
    """Yield cells that rows of one model and mask share, at each of the section's positions."""
    shared: dict[tuple[str, str], list[Asked]] = {}
    for row in rows:
        shared.setdefault((row.model, row.mask), []).append(row)
    for positions in section.positions:
        for together in shared.values():
            for start in range(0, len(together), SHARING):
                yield _score_rows(name, section, together[start : start + SHARING], positions)


def _score_rows(name: str, section: _Section, rows: list[Asked], at: RowPositions) -> Question:
    truth = Run(0, 0)
    streams, pairs, divergences = [Runs(EXACT, (at.d1,))], dict[str, Pair](), dict[str, tuple[Run, Run]]()
    # A condition may be asked for twice, such as a baseline that is a control too: it is computed once.
    for one in {row.condition.name: row for row in rows}.values():
        if one.partner is None:
            streams.append(Runs(one.condition, (at.d1, at.d2)))
            own = a = Run(len(streams) - 1, 0)
            b = Run(len(streams) - 1, 1)
        else:
            streams += [Runs(one.partner, (at.d1,)), Runs(one.condition, (at.d1,))]
            a, b = Run(len(streams) - 2, 0), Run(len(streams) - 1, 0)
            own = b
        pairs |= {one.shift(mode): Pair(a, b, mode) for mode in MODES}
        pairs |= {one.error(mode): Pair(own, truth, mode) for mode in MODES}
        divergences |= {one.shift(): (a, b), one.error(): (truth, own)}
    cell = AttentionCell(
        name, rows[0].model, section.tokens, tuple(streams), pairs, divergences,
        mask=rows[0].mask, documents=getattr(section, "documents", None), gap=at.gap,
    )  # fmt: skip

    def record(row: Asked, results: list[CellResult]) -> schema.Score:
        return schema.Score(
            model=row.model,
            condition=row.condition.name,
            tokens=section.tokens,
            sequences=section.sequences,
            group=row.group,
            base=row.condition.base,
            site=row.condition.site,
            mask=row.mask,
            about=row.condition.about,
            d1=at.d1,
            d2=at.d1 if row.partner is not None else at.d2,
            gap=at.gap,
            shift={mode: difference_of(results, row.shift(mode)) for mode in MODES},
            error={mode: difference_of(results, row.error(mode)) for mode in MODES},
            kl_shift=divergence_of(results, row.shift()),
            kl_error=divergence_of(results, row.error()),
        )

    return Question(per_sequence(cell, section.sequences), lambda results: [record(row, results) for row in rows])


def _reset(section: MasksConfig, name: str) -> Question:
    a, b = "intra", "intra_reset"
    streams = tuple(Runs(condition(name), (0,), mask) for mask in (a, b))
    pairs = {mode: Pair(Run(0, 0), Run(1, 0), mode) for mode in MODES}
    ends = {OUTPUTS: (Run(0, 0), Run(1, 0))}
    cell = AttentionCell(
        "masks", "pretrained", section.tokens, streams, dict(pairs), ends, mask=a, documents=section.documents
    )

    def make(results: list[CellResult]) -> list[AnyRecord]:
        return [
            schema.MaskPair(
                model="pretrained",
                condition=name,
                tokens=section.tokens,
                sequences=section.sequences,
                mode=mode,
                a=a,
                b=b,
                documents=list(results[0].lengths),
                difference=difference_of(results, mode),
                kl=divergence_of(results, OUTPUTS),
            )
            for mode in MODES
        ]

    return Question(per_sequence(cell, section.sequences), make)
