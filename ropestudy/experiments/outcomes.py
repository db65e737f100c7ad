"""The experiments that look at outputs alone: whole setups, doses of mantissa bits, every site. Rows are computed
together, which costs a tenth of comparing their attention.

Legend: S rows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxref.mask import PADDING
from ropestudy import schema
from ropestudy.cells import Bench, CellResult, Experiment
from ropestudy.compute.conditions import EXACT, Condition, condition, dose, on_alone
from ropestudy.compute.engine import divergences_of_rows, final_hidden
from ropestudy.compute.measures import DivergenceSample, divergence
from ropestudy.spec import DoseConfig, OutcomesConfig, Placement, SitesConfig
from ropestudy.text import NO_TARGET, copy_row, open_gap, row

SHARING = 12  # conditions in a cell: each shares its float64 run


@dataclass(frozen=True)
class OutcomeCell:
    """Some conditions on all rows of a setting, beside float64."""

    experiment: str
    tokens: int
    sequences: int
    setting: Placement
    asked: tuple[Condition, ...]
    model: str = "pretrained"
    number: int = 0

    @property
    def conditions(self) -> list[str]:
        """Names, for whoever waits."""
        return [one.name for one in self.asked]

    def run(self, bench: Bench) -> CellResult:
        """Compute it: a divergence from `exact` of each condition and row."""
        decoder, rows = bench.decoder(self.model), RowsOfText.make(bench, self.tokens, self.sequences, self.setting)
        hidden = [
            (final_hidden(decoder, rows.ids, rows.positions, rows.documents_T, one, bench.config.block), one)
            for one in (EXACT, *self.asked)
        ]
        found = divergences_of_rows(decoder, hidden, rows.counted_T, rows.targets)
        return CellResult(samples={}, divergences=_named(self.conditions, found), lengths=(self.tokens,))


class RowsOfText(NamedTuple):
    """Arrays [S, T] int64 of a setting, and the document ids [T] that all share: of attention, and of the outputs that
    count. Of a row cut in two those are the second half's: queries of the first see no key far away.
    """

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    documents_T: np.ndarray
    counted_T: np.ndarray

    @staticmethod
    def make(bench: Bench, tokens: int, sequences: int, setting: Placement) -> "RowsOfText":
        """Return the rows of a study's text."""
        bos = bench.pretrained.bos
        made = []
        for number in range(sequences):
            if setting.task == "copy":
                one, targets = copy_row(bench.pool, number, tokens, bos, bench.config.seed)
            else:
                one = row(bench.pool, number, tokens, bos, bench.config.text.bos)
                targets = one.targets
            made.append((one.ids, open_gap(one.positions, setting.gap) + setting.start, targets))
        ids, positions, targets = (np.stack(arrays) for arrays in zip(*made, strict=True))
        documents_T = np.ones(tokens, np.int64)
        counts_T = np.arange(tokens) >= (tokens // 2 if setting.gap else 0)
        targets = np.where(counts_T, targets, NO_TARGET)
        return RowsOfText(ids, positions, targets, documents_T, np.where(counts_T, documents_T, PADDING))


def _named(names: list[str], found: list[list[DivergenceSample]]) -> dict[str, DivergenceSample]:
    return {
        _at(name, number): one for name, samples in zip(names, found, strict=True) for number, one in enumerate(samples)
    }


def _at(name: str, number: int) -> str:
    return f"{name}: row {number}"


class Together(NamedTuple):
    """Conditions that share a cell, and the setting."""

    conditions: tuple[Condition, ...]
    setting: Placement


@dataclass(frozen=True)
class Outcomes(Experiment[Together]):
    """Whole setups, doses and sites. `name` is the section's."""

    section: Any
    name: str  # type: ignore[misc]
    group: Literal["setup", "dose", "site"]

    def _questions(self) -> Iterator[Together]:
        for setting in self.section.settings:
            for together in self._asked():
                for start in range(0, len(together), SHARING):
                    yield Together(tuple(together[start : start + SHARING]), setting)

    def _asked(self) -> list[list[Condition]]:
        """Return the conditions, those that may share a cell together."""
        section = self.section
        if isinstance(section, OutcomesConfig):
            return [[condition(name) for name in dict.fromkeys(section.conditions)]]
        if isinstance(section, DoseConfig):
            return [[dose(site, bits) for bits in section.mantissa_bits] for site in section.sites]
        assert isinstance(section, SitesConfig)
        return [on_alone(section.format)]

    def _cells(self, question: Together) -> list[OutcomeCell]:
        section = self.section
        return [OutcomeCell(self.name, section.tokens, section.sequences, question.setting, question.conditions)]

    def _records(self, question: Together, results: Mapping[Any, CellResult]) -> list[schema.Outcome]:
        (cell,) = self._cells(question)
        found, made = results[cell].divergences, []
        for one in question.conditions:
            samples = [found[_at(one.name, number)] for number in range(cell.sequences)]
            made.append(
                schema.Outcome(
                    model=cell.model,
                    condition=one.name,
                    tokens=cell.tokens,
                    sequences=cell.sequences,
                    group=self.group,
                    task=question.setting.task,
                    about=one.about,
                    start=question.setting.start,
                    gap=question.setting.gap,
                    site=one.site,
                    mantissa_bits=_bits(one) if self.group == "dose" else None,
                    outputs=divergence(samples),
                )
            )
        return made


def _bits(one: Condition) -> int:
    """The mantissa bits that a dose's name says."""
    return int(one.name.rpartition(", ")[2].split()[0])
