"""The experiments whose rows are `schema.Score`: factorial, remedies, controls, first token, masks.

Every row is asked the same: how far are shifts d1 and d2 apart, how far is shift d1 from float64, and what do the outputs
make of both. A few conditions share a cell, and with it one float64 run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ropestudy import schema
from ropestudy.cells import Cell, CellResult, Job, RunsOf, per_sequence
from ropestudy.conditions import (
    EXACT,
    Condition,
    before_and_after,
    condition,
    off_alone,
    off_together,
    on_alone,
    remedies,
)
from ropestudy.engine import Pair
from ropestudy.measures import difference, divergence
from ropestudy.methods import Method
from ropestudy.spec import (
    ControlsConfig,
    FactorialConfig,
    FirstTokenConfig,
    MasksConfig,
    RemediesConfig,
)
from ropestudy.text import Bos

SHARING = 6  # conditions in a cell
MODES: tuple[schema.Mode, ...] = ("local", "propagated")
MASK_PAIRS = (("intra", "intra_reset"), ("anchor", "anchor_reset"))


@dataclass(frozen=True)
class Asked:
    """A row of the table. `partner`: what stands at the other end of the shift, in place of the condition at d2."""

    group: str
    condition: Condition
    model: str = "pretrained"
    text: Bos = "first"
    mask: str = "full"
    partner: Condition | None = None

    @property
    def place(self) -> tuple[str, Bos, str, bool]:
        """Rows of one place share their cells."""
        return self.model, self.text, self.mask, self.condition.method.sink


def score_jobs(name: str, section: Any, seed: int) -> Iterator[Job]:
    """The jobs of a section whose records are scores."""
    asked = {
        FactorialConfig: _factorial,
        RemediesConfig: _remedies,
        ControlsConfig: lambda section: _controls(section, seed),
        FirstTokenConfig: _first_token,
        MasksConfig: _masks,
    }[type(section)](section)
    documents = section.documents if isinstance(section, MasksConfig) else None
    places: dict[Any, list[Asked]] = {}
    for one in asked:
        places.setdefault(one.place, []).append(one)
    for rows in places.values():
        for start in range(0, len(rows), SHARING):
            yield _job(name, section, rows[start : start + SHARING], documents)
    if isinstance(section, MasksConfig):
        yield from _mask_pairs(name, section)


def _factorial(section: FactorialConfig) -> Iterator[Asked]:
    yield Asked("baseline", EXACT)
    for one in on_alone(section.format):
        yield Asked("on_alone", one)
    for base in section.off_from:
        yield Asked("baseline", replace(condition(base), base=base))
        for one in (*off_alone(base), *off_together(base)):
            yield Asked("off_alone", one)


def _remedies(section: RemediesConfig) -> Iterator[Asked]:
    for base in section.bases:
        yield Asked("baseline", replace(condition(base), base=base))
        for one in remedies(base):
            yield Asked("remedy", one)


def _controls(section: ControlsConfig, seed: int) -> Iterator[Asked]:
    base = condition(section.base)
    yield Asked("baseline", replace(base, base=base.name))
    for one in before_and_after(section.base):
        yield Asked("control", one)
    for name in ("fp32", "fp32_angles64"):
        yield Asked("control", condition(name))
    still = Method(angles="float64")
    for start in (EXACT, base):
        for draw in range(section.phases):
            yield Asked(
                "control",
                Condition(
                    f"{start.name}: random phases {draw}",
                    start.rounding,
                    replace(still, phases=seed + draw),
                    "a constant random phase per rotary pair, against none: as neutral as a shift",
                    start.name,
                ),
                partner=Condition(f"{start.name}: float64 angles", start.rounding, still),
            )
    for model in section.models:
        for name in section.model_conditions:
            yield Asked("control", condition(name), model=model)


def _first_token(section: FirstTokenConfig) -> Iterator[Asked]:
    for name in section.conditions:
        chosen = condition(name)
        for text in ("first", "none", "middle"):
            yield Asked("first_token", replace(chosen, base=name), text=text)
        sink = replace(chosen.method, sink=True)
        about = f"{name}, no BOS, and a logit per head in every softmax that has no position: the BOS' mean one"
        yield Asked(
            "first_token", replace(chosen, name=f"{name} + sink", method=sink, about=about, base=name), text="none"
        )


def _masks(section: MasksConfig) -> Iterator[Asked]:
    for mask in section.masks:
        for name in section.conditions:
            yield Asked("mask", replace(condition(name), base=name), mask=mask)


def _job(name: str, section: Any, rows: Sequence[Asked], documents: int | None) -> Job:
    model, text, mask, sink = rows[0].place
    truth = replace(EXACT, name="exact + sink", method=replace(EXACT.method, sink=True)) if sink else EXACT
    streams, pairs, divergences = [RunsOf(truth, (section.d1,))], [], []
    for one in rows:
        at = len(streams)
        if one.partner is None:
            streams.append(RunsOf(one.condition, (section.d1, section.d2)))
            own, ends = (at, 0), ((at, 0), (at, 1))
        else:
            streams += [RunsOf(one.partner, (section.d1,)), RunsOf(one.condition, (section.d1,))]
            own, ends = (at + 1, 0), ((at, 0), (at + 1, 0))
        pairs += [Pair(*ends, mode) for mode in MODES] + [Pair(own, (0, 0), mode) for mode in MODES]
        divergences += [ends, ((0, 0), own)]
    cell = Cell(
        name, model, 0, section.tokens, tuple(streams), tuple(pairs), tuple(divergences),
        bos=text, mask=mask, documents=documents, sink=sink,
    )  # fmt: skip

    def records(results: list[CellResult]) -> list[Any]:
        made = []
        for number, one in enumerate(rows):

            def of(offset: int, number: int = number) -> dict[Any, schema.Difference]:
                places = (4 * number + offset + i for i in range(len(MODES)))
                return {
                    mode: difference([result.samples[place] for result in results])
                    for mode, place in zip(MODES, places, strict=True)
                }

            kl_shift, kl_error = (
                divergence([result.divergences[2 * number + i] for result in results]) for i in range(2)
            )
            made.append(
                schema.Score(
                    model=model,
                    condition=one.condition.name,
                    tokens=section.tokens,
                    sequences=section.sequences,
                    group=one.group,  # type: ignore[arg-type]
                    base=one.condition.base,
                    site=one.condition.site,
                    text=text,
                    mask=mask,
                    about=one.condition.about,
                    d1=section.d1,
                    d2=section.d1 if one.partner is not None else section.d2,
                    shift=of(0),
                    error=of(2),
                    kl_shift=kl_shift,
                    kl_error=kl_error,
                )
            )
        return made

    return Job(per_sequence(cell, section.sequences), records)


def _mask_pairs(name: str, section: MasksConfig) -> Iterator[Job]:
    for a, b in MASK_PAIRS:
        if not {a, b} <= set(section.masks):
            continue
        for base in section.conditions:
            chosen = condition(base)
            cell = Cell(
                name,
                "pretrained",
                0,
                section.tokens,
                (RunsOf(chosen, (0,), a), RunsOf(chosen, (0,), b)),
                tuple(Pair((0, 0), (1, 0), mode) for mode in MODES),
                (((0, 0), (1, 0)),),
                mask=a,
                documents=section.documents,
            )

            def records(results: list[CellResult], a: str = a, b: str = b, base: str = base) -> list[Any]:
                return [
                    schema.MaskPair(
                        model="pretrained",
                        condition=base,
                        tokens=section.tokens,
                        sequences=section.sequences,
                        mode=mode,
                        a=a,
                        b=b,
                        documents=list(results[0].lengths),
                        difference=difference([result.samples[i] for result in results]),
                        kl=divergence([result.divergences[0] for result in results]),
                    )
                    for i, mode in enumerate(MODES)
                ]

            yield Job(per_sequence(cell, section.sequences), records)
