"""A cell is the smallest piece of a study that is computed and kept. An experiment asks for cells and makes records.

Pairs and divergences of a cell have names. The experiment that gave the names looks its results up by them.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

import jaxref
import ropestudy
from anchorline.environment import versions
from anchorline.files import replace_file
from jaxref.model import Decoder
from ropestudy import text
from ropestudy.compute.conditions import Condition
from ropestudy.compute.engine import Pair, Row, Run, Stream, compare
from ropestudy.compute.measures import DivergenceSample, Sample, difference, divergence, sample
from ropestudy.models import Pretrained, variant
from ropestudy.schema import AnyRecord, Difference, OutputDivergence
from ropestudy.spec import StudyConfig

# Files and folders of the two packages that only show numbers or test them.
SHOWS_ONLY = {"tests", "report", "cli.py"}
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tokenizers", "gguf", "pydantic", "anchorline")


class CellResult(BaseModel):
    """A sample of each pair and of each divergence, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: dict[str, Sample] = {}
    divergences: dict[str, DivergenceSample]
    lengths: tuple[int, ...] = ()  # tokens of the row's documents
    seconds: float = 0.0


@dataclass(frozen=True)
class Cell:
    """What every cell has. Its repr names all that its numbers depend on, apart from the model and the text."""

    experiment: str
    model: str
    tokens: int

    @property
    def about(self) -> str:
        """What is computed, for the line of progress."""
        raise NotImplementedError

    def compute(self, bench: "Bench") -> CellResult:
        """Compute it."""
        raise NotImplementedError


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
    columns_of: the pair whose columns are kept.
    documents: in a packed row, which always opens with the BOS.
    gap: between the positions of the row's two halves.
    """

    streams: tuple[Runs, ...]
    pairs: dict[str, Pair]
    divergences: dict[str, tuple[Run, Run]]
    number: int = 0  # of the row
    columns_of: str | None = None
    mask: str = "full"
    documents: int | None = None
    gap: int = 0

    @property
    def about(self) -> str:
        """The sequence and the conditions."""
        return f"sequence {self.number}: {', '.join(dict.fromkeys(runs.condition.name for runs in self.streams))}"

    def compute(self, bench: "Bench") -> CellResult:
        """Compare the attention of its pairs, and the outputs of its divergences."""
        made, streams = self._row(bench, self.mask), []
        for runs in self.streams:
            base = made if runs.mask is None else self._row(bench, runs.mask)
            assert np.array_equal(base.documents, made.documents), "runs of other documents are not the same function"
            positions_T = text.open_gap(base.positions, self.gap)
            streams.append(Stream(runs.condition, positions_T + np.array(runs.shifts)[:, None]))
        row = Row(made.ids, made.documents, made.targets)
        ends, block = list(self.divergences.values()), bench.config.block
        sums, divergences = compare(bench.decoder(self.model), row, streams, list(self.pairs.values()), ends, block)
        samples = {name: sample(one, made.documents) for name, one in zip(self.pairs, sums, strict=True)}
        return CellResult(
            samples={
                name: one if name == self.columns_of else one.model_copy(update={"columns": {}})
                for name, one in samples.items()
            },
            divergences=dict(zip(self.divergences, divergences, strict=True)),
            lengths=made.lengths,
        )

    def _row(self, bench: "Bench", mask: str) -> text.RowArrays:
        bos = bench.pretrained.bos
        if self.documents is None:
            return text.row(bench.pool, self.number, self.tokens, bos)
        assert bos is not None
        return text.packed_row(bench.pool, self.number, self.tokens, bos, self.documents, mask)


class Question(NamedTuple):
    """Cells that answer one question of an experiment, and what makes records of their results, in the same order."""

    cells: Sequence[Cell]
    make_records: Callable[[list[CellResult]], Sequence[AnyRecord]]


def per_sequence(cell: AttentionCell, sequences: int) -> list[AttentionCell]:
    """Return the cell for each sequence."""
    return [replace(cell, number=number) for number in range(sequences)]


def difference_of(results: Iterable[CellResult], pair: str) -> Difference:
    """Return one pair over all sequences."""
    return difference([result.samples[pair] for result in results])


def divergence_of(results: Iterable[CellResult], name: str) -> OutputDivergence:
    """Return one divergence over all sequences."""
    return divergence([result.divergences[name] for result in results])


class Bench:
    """Computes cells and keeps them. It holds the text, the model, and the last of its variants that was used."""

    def __init__(self, config: StudyConfig, pretrained: Pretrained, pool: text.Pool):
        self.config, self.pretrained, self.pool = config, pretrained, pool
        self._variant: tuple[str, Decoder] | None = None

    def run(self, cell: Cell) -> CellResult:
        """Compute a cell."""
        started = time.perf_counter()
        return cell.compute(self).model_copy(update={"seconds": time.perf_counter() - started})

    def kept_or_run(self, cell: Cell, folder: Path) -> CellResult:
        """Return the cell from its file, or compute it and write the file."""
        path = folder / f"{cell.experiment}-{self.key(cell)}.json"
        try:
            return CellResult.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            result = self.run(cell)
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, result.model_dump_json().encode())
            return result

    def key(self, cell: Cell) -> str:
        """Return a hash of everything that the cell's numbers depend on."""
        digest = hashlib.sha256(f"{cell!r} {self.config.block} {self.config.seed}".encode())
        digest.update(f"{self.pretrained.sha256} {self.pretrained.bos} {fingerprint()}".encode())
        for ids in self.pool.ids:
            digest.update(ids.tobytes())
        return digest.hexdigest()[:40]

    def decoder(self, name: str) -> Decoder:
        """Return a model by name."""
        if name == "pretrained":
            return self.pretrained.decoder
        if self._variant is None or self._variant[0] != name:
            self._variant = None  # first free the last one: two may not fit into memory
            self._variant = (name, variant(self.pretrained, name, self.config.seed))
        return self._variant[1]


@cache
def fingerprint() -> str:
    """Return a hash of the sources, the libraries and the device: a cell is computed again when one of them changes."""
    digest = hashlib.sha256(f"{versions(LIBRARIES)} {jax.devices()[0].device_kind}".encode())
    for root in (Path(package.__path__[0]) for package in (jaxref, ropestudy)):
        for file in sorted(root.rglob("*.py")):
            if not SHOWS_ONLY & set(file.relative_to(root).parts):
                digest.update(file.read_bytes())
    return digest.hexdigest()
