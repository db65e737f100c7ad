"""The experiments that put one condition on every scale: factorial, remedies, controls, masks.

Each condition answers three questions. How far apart are shifts d1 and d2? How far is shift d1 from float64? What do
both do to the outputs? A few conditions share a cell, and with it one float64 run.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ropestudy import schema
from ropestudy.cells import Question
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
from ropestudy.compute.engine import Run
from ropestudy.compute.methods import Method
from ropestudy.experiments.attention import Comparison, Runs, make_question
from ropestudy.experiments.shifts import MODES
from ropestudy.spec import ControlsConfig, FactorialConfig, MasksConfig, RemediesConfig, RowPositions

SHARING = 6  # conditions in a cell
CONTROLLED = "hf_eager_bf16"  # the preset that controls are made for

_Section = FactorialConfig | RemediesConfig | ControlsConfig | MasksConfig


@dataclass(frozen=True)
class Asked:
    """A condition that is asked about. `partner`: the other end of the shift, in place of the condition at d2."""

    group: schema.AttentionGroup
    condition: Condition
    model: str = "pretrained"
    mask: str = "full"
    partner: Condition | None = None


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
    truth, streams = Run(0, 0), [Runs(EXACT, (at.d1,))]
    runs: dict[str, tuple[Run, Run, Run]] = {}  # by condition: its own run at d1, and the two ends of its shift
    comparisons = []
    for row in rows:
        one, new = row.condition, len(streams)
        if one.name not in runs and row.partner is None:
            streams.append(Runs(one, (at.d1, at.d2)))
            runs[one.name] = (Run(new, 0), Run(new, 0), Run(new, 1))
        elif one.name not in runs and row.partner is not None:
            streams += [Runs(row.partner, (at.d1,)), Runs(one, (at.d1,))]
            runs[one.name] = (Run(new + 1, 0), Run(new, 0), Run(new + 1, 0))
        own, a, b = runs[one.name]
        against, d2 = ("shift", at.d2) if row.partner is None else ("phases", at.d1)
        comparisons += [
            Comparison(row.group, one, against, at.d1, d2, a, b, MODES, (a, b)),
            Comparison(row.group, one, "exact", at.d1, at.d1, own, truth, MODES, (truth, own)),
        ]
    rest = {"mask": rows[0].mask, "documents": getattr(section, "documents", None), "gap": at.gap}
    return make_question(name, rows[0].model, section.tokens, section.sequences, streams, comparisons, **rest)


def _reset(section: MasksConfig, name: str) -> Question:
    """The same tokens with and without reset positions."""
    one, ends = condition(name), (Run(0, 0), Run(1, 0))
    streams = [Runs(one, (0,), mask) for mask in ("intra", "intra_reset")]
    comparison = Comparison("mask", replace(one, base=one.name), "reset", 0, 0, *ends, MODES, ends)
    rest = {"mask": "intra", "documents": section.documents}
    return make_question("masks", "pretrained", section.tokens, section.sequences, streams, [comparison], **rest)
