"""The experiments that look at outputs alone: whole setups, doses of mantissa bits, every site.

All rows are computed together, and no attention is compared: that costs a tenth.

Legend: S rows · T tokens of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from jaxref.mask import PADDING
from ropestudy import schema
from ropestudy.cells import Bench, Cell, CellResult, Question
from ropestudy.compute.conditions import DOSES, EXACT, Condition, condition, dose, on_alone
from ropestudy.compute.engine import divergences_of_rows, final_hidden
from ropestudy.compute.measures import divergence
from ropestudy.experiments.attention import describe
from ropestudy.spec import DoseConfig, OutcomesConfig, Placement, SitesConfig
from ropestudy.text import NO_TARGET, copy_row, open_gap, row

SHARING = 12  # conditions in a cell: each shares its float64 run


@dataclass(frozen=True)
class OutcomeCell(Cell):
    """Some conditions, and float64, on all rows of a setting."""

    sequences: int
    setting: Placement
    conditions: tuple[Condition, ...]

    @property
    def about(self) -> str:
        """The conditions."""
        return f"all sequences: {', '.join(one.name for one in self.conditions)}"

    def compute(self, bench: Bench) -> CellResult:
        """Return the divergence from `exact` of each condition, row by row."""
        decoder, rows = bench.decoder(self.model), RowsOfText.make(bench, self.tokens, self.sequences, self.setting)
        hidden = [
            (final_hidden(decoder, rows.ids, rows.positions, rows.documents_T, one, bench.config.block), one)
            for one in (EXACT, *self.conditions)
        ]
        diverged = divergences_of_rows(decoder, hidden, rows.counted_T, rows.targets)
        return CellResult(divergences=[sample for samples in diverged for sample in samples])


class RowsOfText(NamedTuple):
    """Arrays [S, T] int64 of a setting, and the document ids [T] that all rows share: of attention, and of the outputs
    that count. In a row with a gap only the second half counts: queries of the first half see no key far away.
    """

    ids: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    documents_T: np.ndarray
    counted_T: np.ndarray

    @staticmethod
    def make(bench: Bench, tokens: int, sequences: int, setting: Placement) -> "RowsOfText":
        """Return the rows of a study's text."""
        bos, made = bench.pretrained.bos, []
        for number in range(sequences):
            if setting.task == "copy":
                one, targets = copy_row(bench.pool, number, tokens, bos, bench.config.seed)
            else:
                one = row(bench.pool, number, tokens, bos)
                targets = one.targets
            made.append((one.ids, open_gap(one.positions, setting.gap, tokens // 2) + setting.start, targets))
        ids, positions, targets = (np.stack(arrays) for arrays in zip(*made, strict=True))
        documents_T = np.ones(tokens, np.int64)
        counts_T = np.arange(tokens) >= (tokens // 2 if setting.gap else 0)
        targets = np.where(counts_T, targets, NO_TARGET)
        return RowsOfText(ids, positions, targets, documents_T, np.where(counts_T, documents_T, PADDING))


def setups(section: OutcomesConfig, seed: int) -> Iterator[Question]:
    """What whole setups do to the outputs."""
    return _outcomes("setups", "setup", section, [[condition(name) for name in dict.fromkeys(section.conditions)]])


def doses(section: DoseConfig, seed: int) -> Iterator[Question]:
    """How many bits RoPE needs, site by site."""
    asked = [[dose(site, bits) for bits in section.mantissa_bits] for site in DOSES]
    return _outcomes("dose", "dose", section, asked)


def sites(section: SitesConfig, seed: int) -> Iterator[Question]:
    """Every site alone."""
    return _outcomes("sites", "site", section, [on_alone()])


def _outcomes(
    name: str,
    group: schema.OutputsGroup,
    section: OutcomesConfig | DoseConfig | SitesConfig,
    asked: list[list[Condition]],
) -> Iterator[Question]:
    """asked: lists of conditions that may share a cell."""
    for setting in section.settings:
        for together in asked:
            for start in range(0, len(together), SHARING):
                conditions = tuple(together[start : start + SHARING])
                cell = OutcomeCell(name, "pretrained", section.tokens, section.sequences, setting, conditions)
                yield Question([cell], partial(_records, group, cell))


def _records(group: schema.OutputsGroup, cell: OutcomeCell, results: list[CellResult]) -> list[schema.OutputsRecord]:
    (result,), setting = results, cell.setting
    about: dict[str, Any] = {
        "group": group,
        "model": cell.model,
        "tokens": cell.tokens,
        "sequences": cell.sequences,
        "gap": setting.gap,
    }
    about |= {"d1": setting.start, "against": "exact", "d2": setting.start, "task": setting.task}
    return [
        schema.OutputsRecord(
            **about | describe(one), outputs=divergence(result.divergences[first : first + cell.sequences])
        )
        for one, first in zip(cell.conditions, range(0, len(result.divergences), cell.sequences), strict=True)
    ]
