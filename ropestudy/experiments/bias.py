"""The sign of what rounding does to logits: which part of it is the same in every text, and what that part alone does.

Legend: S texts · L layers · H heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ropestudy import schema
from ropestudy.cells import ERROR, TRUTH, Bench, Cell, CellResult, NamedPair, Question, RunAt, RunsOf
from ropestudy.compute.conditions import EXACT, condition
from ropestudy.compute.engine import divergences_of_rows, final_hidden
from ropestudy.compute.measures import Sample, divergence, stat
from ropestudy.experiments.outcomes import RowsOfText
from ropestudy.schema import AnyRecord
from ropestudy.spec import BiasCase, BiasConfig, Placement

OWN, ALONE, WHOLE = "own", "alone", "whole"


@dataclass(frozen=True)
class BiasCell:
    """One case on all texts."""

    case: BiasCase
    tokens: int
    sequences: int
    documents: int
    columns: tuple[int, ...]
    experiment: str = "bias"
    model: str = "pretrained"
    number: int = 0

    @property
    def conditions(self) -> list[str]:
        """Names, for whoever waits."""
        return [f"{self.case.condition} under {self.case.mask} at {self.case.start}, gap {self.case.gap}"]

    def run(self, bench: Bench) -> CellResult:
        """Compute it: a sample of each text, and what the bias alone, and all of the condition, do to its outputs."""
        case, own = self.case, condition(self.case.condition)
        streams = (RunsOf(OWN, own, (case.start,)), RunsOf(TRUTH, EXACT, (case.start,)))
        pair = NamedPair(ERROR, RunAt(OWN, case.start), RunAt(TRUTH, case.start), "local", keep_columns=True)
        packed = None if case.mask == "full" else self.documents
        samples = []
        for number in range(self.sequences):
            cell = Cell(
                self.experiment, self.model, number, self.tokens, streams, (pair,), mask=case.mask, documents=packed,
                gap=case.gap,
            )  # fmt: skip
            samples.append(bench.compare(cell, self.columns).samples[ERROR])
        divergences = self._outputs(bench, samples) if case.loss else {}
        return CellResult(
            samples={str(number): one for number, one in enumerate(samples)},
            divergences=divergences,
            lengths=(self.tokens,),
        )

    def _outputs(self, bench: Bench, samples: Sequence[Sample]) -> dict[str, Any]:
        decoder = bench.decoder(self.model)
        config = decoder.config
        setting = Placement(start=self.case.start, gap=self.case.gap)
        rows = RowsOfText.make(bench, self.tokens, self.sequences, setting)
        bias_SLH = np.array([one.signed[0] for one in samples]).reshape(
            self.sequences, config.num_hidden_layers, config.num_attention_heads
        )
        # Of the other texts, so that none is tried with a bias that was measured on itself.
        others_SLH = (bias_SLH.sum(0) - bias_SLH) / max(1, self.sequences - 1)
        given, block = (rows.ids, rows.positions, rows.documents_T), bench.config.block
        hidden = [
            (final_hidden(decoder, *given, EXACT, block), EXACT),
            (final_hidden(decoder, *given, EXACT, block, others_SLH), EXACT),
            (final_hidden(decoder, *given, condition(self.case.condition), block), condition(self.case.condition)),
        ]
        alone, whole = divergences_of_rows(decoder, hidden, rows.counted_T, rows.targets)
        return {f"{ALONE} {n}": one for n, one in enumerate(alone)} | {f"{WHOLE} {n}": x for n, x in enumerate(whole)}


def bias(section: BiasConfig) -> Iterator[Question]:
    """Every case."""
    spread = np.linspace(0, section.tokens - 1, section.columns + 2)[1:-1]
    columns = (0, *sorted({int(j) for j in spread} - {0}))
    for case in section.cases:
        cell = BiasCell(case, section.tokens, section.sequences, section.documents, columns)
        yield Question([cell], partial(_records, cell))


def _records(cell: BiasCell, results: list[CellResult]) -> list[AnyRecord]:
    (found,) = results
    samples = [found.samples[str(number)] for number in range(cell.sequences)]
    heads = len(samples[0].signed[0])
    outputs = {
        what: divergence([found.divergences[f"{what} {number}"] for number in range(cell.sequences)])
        for what in (ALONE, WHOLE)
        if cell.case.loss
    }
    record = schema.SignedBias(
        model=cell.model,
        condition=cell.case.condition,
        tokens=cell.tokens,
        sequences=cell.sequences,
        mask=cell.case.mask,
        start=cell.case.start,
        gap=cell.case.gap,
        first=gram([one.signed[0] for one in samples]).tolist(),
        others=np.mean([gram([one.signed[j] for one in samples]) for j in cell.columns[1:]], axis=0).tolist(),
        columns=list(cell.columns[1:]),
        first_abs=stat([one.d_logit_first / heads for one in samples]),
        first_mass=stat([one.first_mass_unweighted for one in samples]),
        alone=outputs.get(ALONE),
        whole=outputs.get(WHOLE),
    )
    return [record]


def gram(vectors: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the mean products of every two vectors, [S, S]."""
    x = np.array(vectors)
    return x @ x.T / x.shape[1]
