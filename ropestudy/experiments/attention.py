"""Cells that compare the attention of runs, and the records that are made of them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ropestudy import schema, text
from ropestudy.cells import Bench, Cell, CellResult, Question
from ropestudy.compute.conditions import Condition
from ropestudy.compute.engine import Pair, Row, Run, Stream, compare
from ropestudy.compute.measures import columns, difference, divergence, sample


@dataclass(frozen=True)
class Runs:
    """A stream of `engine.compare`: a condition at the row's positions plus each shift. `mask` None: the cell's own."""

    condition: Condition
    shifts: tuple[int, ...]
    mask: str | None = None


@dataclass(frozen=True)
class AttentionCell(Cell):
    """The attention of pairs of runs, and the outputs of others, on one row.

    streams, pairs, divergences: see `engine.compare`.
    columns_of: pairs whose columns are kept, by their places.
    documents: in a packed row, which always opens with the BOS.
    opening: of a row of one document.
    gap: between the positions of the row's two halves, or between an anchor and the rest.
    """

    streams: tuple[Runs, ...]
    pairs: tuple[Pair, ...]
    divergences: tuple[tuple[Run, Run], ...]
    number: int = 0  # of the row
    columns_of: tuple[int, ...] = ()
    mask: str = "full"
    documents: int | None = None
    opening: schema.Opening = "bos"
    gap: int = 0

    @property
    def about(self) -> str:
        """The sequence and the conditions."""
        return f"sequence {self.number}: {', '.join(dict.fromkeys(runs.condition.name for runs in self.streams))}"

    def compute(self, bench: Bench) -> CellResult:
        """Compare the attention of its pairs, and the outputs of its divergences."""
        made, streams = self._row(bench, self.mask), []
        for runs in self.streams:
            base = made if runs.mask is None else self._row(bench, runs.mask)
            assert np.array_equal(base.documents, made.documents), "runs of other documents are not the same function"
            positions_T = text.open_gap(base.positions, self.gap, 1 if self.opening == "anchor" else self.tokens // 2)
            streams.append(Stream(runs.condition, positions_T + np.array(runs.shifts)[:, None]))
        row, decoder = Row(made.ids, made.documents, made.targets), bench.decoder(self.model)
        sums, divergences = compare(decoder, row, streams, self.pairs, self.divergences, bench.config.block)
        samples = [sample(one, made.documents) for one in sums]
        for place in set(range(len(samples))) - set(self.columns_of):
            samples[place] = samples[place].model_copy(update={"columns": {}})
        return CellResult(samples=samples, divergences=divergences)

    def _row(self, bench: Bench, mask: str) -> text.RowArrays:
        bos = None if self.opening == "none" else bench.pretrained.bos
        if self.documents is None:
            return text.row(bench.pool, self.number, self.tokens, bos)
        assert bos is not None
        return text.packed_row(bench.pool, self.number, self.tokens, bos, self.documents, mask)


@dataclass(frozen=True)
class Comparison:
    """A condition that is compared with something, and which runs show it.

    a, b: the runs whose attention is compared, in each of the modes.
    outputs: the runs (p, q) whose outputs are compared.
    with_columns: keep the difference token by token.
    """

    group: schema.AttentionGroup
    condition: Condition
    against: schema.Against
    d1: int
    d2: int
    a: Run
    b: Run
    modes: tuple[schema.Mode, ...]
    outputs: tuple[Run, Run] | None = None
    with_columns: bool = False

    @property
    def pairs(self) -> list[Pair]:
        """The pairs of attentions, in the order of the modes."""
        return [Pair(self.a, self.b, mode) for mode in self.modes]


def make_question(
    experiment: str,
    model: str,
    tokens: int,
    sequences: int,
    streams: Sequence[Runs],
    comparisons: Sequence[Comparison],
    **rest: Any,
) -> Question:
    """Return the question of some comparisons on the same rows. rest: of `AttentionCell`."""
    # Two comparisons may ask for the same pair, such as a baseline that is a control too: it is computed once.
    pairs = tuple(dict.fromkeys(pair for one in comparisons for pair in one.pairs))
    ends = tuple(dict.fromkeys(one.outputs for one in comparisons if one.outputs))
    shown = tuple(pairs.index(pair) for one in comparisons if one.with_columns for pair in one.pairs)
    cell = AttentionCell(experiment, model, tokens, tuple(streams), pairs, ends, columns_of=shown, **rest)

    def records(results: list[CellResult]) -> Iterator[schema.AnyRecord]:
        for one in comparisons:
            about: dict[str, Any] = describe(one.condition) | {
                **{"group": one.group, "model": model, "tokens": tokens, "sequences": len(results)},
                **{"mask": cell.mask, "opening": cell.opening, "gap": cell.gap},
                **{"d1": one.d1, "against": one.against, "d2": one.d2},
            }
            for pair in one.pairs:
                samples = [result.samples[pairs.index(pair)] for result in results]
                by_token = columns(samples) if one.with_columns else None
                yield schema.AttentionRecord(**about, mode=pair.mode, difference=difference(samples), columns=by_token)
            if one.outputs:
                place = ends.index(one.outputs)
                yield schema.OutputsRecord(
                    **about, outputs=divergence([result.divergences[place] for result in results])
                )

    cells = [replace(cell, number=number) for number in range(sequences)]
    return Question(cells, lambda results: list(records(results)))


def describe(one: Condition) -> dict[str, Any]:
    """Return what records say about a condition."""
    return {
        "condition": one.name,
        "about": one.about,
        "base": one.base,
        "site": one.site,
        "mantissa_bits": one.mantissa_bits,
    }
