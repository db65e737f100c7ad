"""The experiments whose rows are `schema.Score`: factorial, remedies, controls, first token, masks.

Every row is asked the same: how far are shifts d1 and d2 apart, how far is shift d1 from float64, and what do the
outputs make of both. A few conditions share a cell, and with it one float64 run.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ropestudy import schema
from ropestudy.cells import (
    ERROR,
    SHIFT,
    TRUTH,
    Cell,
    CellResult,
    Experiment,
    NamedDivergence,
    NamedPair,
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
from ropestudy.schema import Mode
from ropestudy.spec import (
    ControlsConfig,
    FactorialConfig,
    FirstTokenConfig,
    MasksConfig,
    RemediesConfig,
    RowPositions,
)
from ropestudy.text import Bos

SHARING = 6  # conditions in a cell
MODES: tuple[Mode, ...] = ("local", "propagated")
OUTPUTS = "outputs"  # the name of a divergence
MASK_PAIRS = (("intra", "intra_reset"), ("anchor", "anchor_reset"))


@dataclass(frozen=True)
class Asked:
    """A row of the table. `partner`: what stands at the other end of the shift, in place of the condition at d2."""

    group: schema.Group
    condition: Condition
    model: str = "pretrained"
    text: Bos = "first"
    mask: str = "full"
    partner: Condition | None = None

    @property
    def place(self) -> "Place":
        """Rows of one place share their cells."""
        return Place(self.model, self.text, self.mask, self.condition.method.sink)

    def name(self, what: str, mode: Mode | None = None) -> str:
        """Return the name of one of its pairs or, without a mode, of its divergences."""
        return f"{self.condition.name}: {what}" + (f", {mode}" if mode else "")


class Place(NamedTuple):
    """What all rows of a cell share."""

    model: str
    text: Bos
    mask: str
    sink: bool


class Inquiry(NamedTuple):
    """Rows that share their cells, and where these stand."""

    rows: list[Asked]
    positions: RowPositions


class Scores(Experiment[Inquiry]):
    """An experiment that asks for rows of the table, at each of its positions."""

    section: Any  # with positions, tokens and sequences

    @abstractmethod
    def list_rows(self) -> Iterator[Asked]:
        """Return every row."""

    @property
    def documents(self) -> int | None:
        """Documents in a packed row."""
        return None

    def _questions(self) -> Iterator[Inquiry]:
        places: dict[Place, list[Asked]] = {}
        for one in self.list_rows():
            places.setdefault(one.place, []).append(one)
        for positions in self.section.positions:
            for rows in places.values():
                for start in range(0, len(rows), SHARING):
                    yield Inquiry(rows[start : start + SHARING], positions)

    def _cells(self, question: Inquiry) -> list[Cell]:
        rows, positions = question
        section, place = self.section, rows[0].place
        exact = replace(EXACT, name="exact + sink", method=replace(EXACT.method, sink=True)) if place.sink else EXACT
        truth = RunAt(TRUTH, positions.d1)
        streams, pairs, divergences = [RunsOf(TRUTH, exact, (positions.d1,))], [], []
        # A condition may be asked for twice, such as a baseline that is a control too: it is computed once.
        for one in {row.condition.name: row for row in rows}.values():
            name = one.condition.name
            own = RunAt(name, positions.d1)
            if one.partner is None:
                streams.append(RunsOf(name, one.condition, (positions.d1, positions.d2)))
                a, b = own, RunAt(name, positions.d2)
            else:
                without = f"{name}, partner"
                streams += [
                    RunsOf(without, one.partner, (positions.d1,)),
                    RunsOf(name, one.condition, (positions.d1,)),
                ]
                a, b = RunAt(without, positions.d1), own
            pairs += [NamedPair(one.name(SHIFT, mode), a, b, mode) for mode in MODES]
            pairs += [NamedPair(one.name(ERROR, mode), own, truth, mode) for mode in MODES]
            divergences += [NamedDivergence(one.name(SHIFT), a, b), NamedDivergence(one.name(ERROR), truth, own)]
        cell = Cell(
            self.name, place.model, 0, section.tokens, tuple(streams), tuple(pairs), tuple(divergences),
            bos=place.text, mask=place.mask, documents=self.documents, sink=place.sink, gap=positions.gap,
        )  # fmt: skip
        return per_sequence(cell, section.sequences)

    def _records(self, question: Inquiry, results: Mapping[Cell, CellResult]) -> list[schema.Score]:
        found = [results[cell] for cell in self._cells(question)]
        return [self._score(row, question.positions, found) for row in question.rows]

    def _score(self, row: Asked, positions: RowPositions, results: list[CellResult]) -> schema.Score:
        section = self.section
        return schema.Score(
            model=row.model,
            condition=row.condition.name,
            tokens=section.tokens,
            sequences=section.sequences,
            group=row.group,
            base=row.condition.base,
            site=row.condition.site,
            text=row.text,
            mask=row.mask,
            about=row.condition.about,
            d1=positions.d1,
            d2=positions.d1 if row.partner is not None else positions.d2,
            gap=positions.gap,
            shift={mode: difference_of(results, row.name(SHIFT, mode)) for mode in MODES},
            error={mode: difference_of(results, row.name(ERROR, mode)) for mode in MODES},
            kl_shift=divergence_of(results, row.name(SHIFT)),
            kl_error=divergence_of(results, row.name(ERROR)),
        )


@dataclass(frozen=True)
class Factorial(Scores):
    """Every rounding site alone, and every site left out."""

    section: FactorialConfig
    name = "factorial"

    def list_rows(self) -> Iterator[Asked]:
        """Return float64, every site, every preset and each of its sites."""
        yield Asked("baseline", EXACT)
        for one in on_alone(self.section.format):
            yield Asked("on_alone", one)
        for base in self.section.off_from:
            yield Asked("baseline", replace(condition(base), base=base))
            for one in (*off_alone(base), *off_together(base)):
                yield Asked("off_alone", one)


@dataclass(frozen=True)
class Remedies(Scores):
    """What is done against it."""

    section: RemediesConfig
    name = "remedies"

    def list_rows(self) -> Iterator[Asked]:
        """Return each preset, and every remedy of it."""
        for base in self.section.bases:
            yield Asked("baseline", replace(condition(base), base=base))
            for one in remedies(base):
                if self.section.only is None or one.name.removeprefix(f"{base}: ") in self.section.only:
                    yield Asked("remedy", one)


@dataclass(frozen=True)
class Controls(Scores):
    """What must hold, or must not, if rounding is the cause. seed: of the random phases."""

    section: ControlsConfig
    seed: int
    name = "controls"

    def list_rows(self) -> Iterator[Asked]:
        """Return the preset, its controls, and every model."""
        section = self.section
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
                        replace(still, phases=self.seed + draw),
                        "a constant random phase per rotary pair, against none: as neutral as a shift",
                        start.name,
                    ),
                    partner=Condition(f"{start.name}: float64 angles", start.rounding, still),
                )
        for model in section.models:
            for name in section.model_conditions:
                yield Asked("control", condition(name), model=model)


@dataclass(frozen=True)
class FirstToken(Scores):
    """The sink, and what is left without it."""

    section: FirstTokenConfig
    name = "first_token"

    def list_rows(self) -> Iterator[Asked]:
        """Return each condition with the BOS in every place, and with a sink in its stead."""
        for name in self.section.conditions:
            chosen = condition(name)
            for text in ("first", "none", "middle"):
                yield Asked("first_token", replace(chosen, base=name), text=text)
            sink = replace(chosen.method, sink=True)
            about = f"{name}, no BOS, and a logit per head in every softmax that has no position: the BOS' mean one"
            with_sink = replace(chosen, name=f"{name} + sink", method=sink, about=about, base=name)
            yield Asked("first_token", with_sink, text="none")


@dataclass(frozen=True)
class Masks(Scores):
    """Packed documents under every mask."""

    section: MasksConfig
    name = "masks"

    @property
    def documents(self) -> int:
        """Documents in a packed row."""
        return self.section.documents

    def list_rows(self) -> Iterator[Asked]:
        """Return every mask under every condition."""
        for mask in self.section.masks:
            for name in self.section.conditions:
                yield Asked("mask", replace(condition(name), base=name), mask=mask)


class TwoMasks(NamedTuple):
    """Two masks that see the same, and a condition."""

    a: str
    b: str
    condition: str


@dataclass(frozen=True)
class MaskPairs(Experiment[TwoMasks]):
    """Packed documents, the same tokens under two masks, wherever both are among the section's."""

    section: MasksConfig
    name = "masks"

    def _questions(self) -> Iterator[TwoMasks]:
        for a, b in MASK_PAIRS:
            if {a, b} <= set(self.section.masks):
                for name in self.section.conditions:
                    yield TwoMasks(a, b, name)

    def _cells(self, question: TwoMasks) -> list[Cell]:
        section, (a, b, name) = self.section, question
        ends = RunAt(a, 0), RunAt(b, 0)
        cell = Cell(
            self.name,
            "pretrained",
            0,
            section.tokens,
            tuple(RunsOf(mask, condition(name), (0,), mask) for mask in (a, b)),
            tuple(NamedPair(mode, *ends, mode) for mode in MODES),
            (NamedDivergence(OUTPUTS, *ends),),
            mask=a,
            documents=section.documents,
        )
        return per_sequence(cell, section.sequences)

    def _records(self, question: TwoMasks, results: Mapping[Cell, CellResult]) -> list[schema.MaskPair]:
        found = [results[cell] for cell in self._cells(question)]
        return [
            schema.MaskPair(
                model="pretrained",
                condition=question.condition,
                tokens=self.section.tokens,
                sequences=self.section.sequences,
                mode=mode,
                a=question.a,
                b=question.b,
                documents=list(found[0].lengths),
                difference=difference_of(found, mode),
                kl=divergence_of(found, OUTPUTS),
            )
            for mode in MODES
        ]
