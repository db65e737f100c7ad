"""The experiments that look at outputs alone: whole setups, doses of mantissa bits, every site. Rows are computed
together, which costs a tenth of comparing their attention.

Legend: S rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxref.mask import PADDING
from ropestudy import schema
from ropestudy.cells import Bench, CellResult, Question
from ropestudy.compute.conditions import EXACT, Condition, condition, dose, on_alone
from ropestudy.compute.engine import divergences_of_rows, final_hidden
from ropestudy.compute.measures import divergence
from ropestudy.schema import AnyRecord
from ropestudy.spec import DoseConfig, OutcomesConfig, Placement, SitesConfig
from ropestudy.text import NO_TARGET, copy_row, open_gap, row

SHARING = 12  # conditions in a cell: each shares its float64 run


@dataclass(frozen=True)
class OutcomeCell:
    """Some conditions, and float64, on all rows of a setting."""

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
        divergences = {
            _at(name, number): one
            for name, samples in zip(self.conditions, found, strict=True)
            for number, one in enumerate(samples)
        }
        return CellResult(samples={}, divergences=divergences, lengths=(self.tokens,))


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


def _at(name: str, number: int) -> str:
    return f"{name}: row {number}"


def setups(section: OutcomesConfig) -> Iterator[Question]:
    """What whole setups make of the outputs."""
    return _outcomes("setups", "setup", section, [[condition(name) for name in dict.fromkeys(section.conditions)]])


def doses(section: DoseConfig) -> Iterator[Question]:
    """How many bits RoPE needs, site by site."""
    asked = [[dose(site, bits) for bits in section.mantissa_bits] for site in section.sites]
    return _outcomes("dose", "dose", section, asked)


def sites(section: SitesConfig) -> Iterator[Question]:
    """Every site alone."""
    return _outcomes("sites", "site", section, [on_alone(section.format)])


def _outcomes(name: str, group: Literal["setup", "dose", "site"], section: Any, asked: Any) -> Iterator[Question]:
    """asked: lists of conditions that may share a cell."""
    for setting in section.settings:
        for together in asked:
            for start in range(0, len(together), SHARING):
                conditions = tuple(together[start : start + SHARING])
                cell = OutcomeCell(name, section.tokens, section.sequences, setting, conditions)
                yield Question([cell], partial(_records, group, cell))


def _records(group: Literal["setup", "dose", "site"], cell: OutcomeCell, results: list[CellResult]) -> list[AnyRecord]:
    (result,) = results
    return [
        schema.Outcome(
            model=cell.model,
            condition=one.name,
            tokens=cell.tokens,
            sequences=cell.sequences,
            group=group,
            task=cell.setting.task,
            about=one.about,
            start=cell.setting.start,
            gap=cell.setting.gap,
            site=one.site,
            mantissa_bits=_bits(one) if group == "dose" else None,
            outputs=divergence([result.divergences[_at(one.name, number)] for number in range(cell.sequences)]),
        )
        for one in cell.asked
    ]


def _bits(one: Condition) -> int:
    """The mantissa bits that a dose's name says."""
    return int(one.name.rpartition(", ")[2].split()[0])
