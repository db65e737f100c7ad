"""A cell: the smallest piece of a study that is computed, kept and taken up again. One row, some conditions, many pairs."""

import hashlib
import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

import jaxref
import ropestudy
from jaxref.model import Decoder
from ropestudy import text
from ropestudy.conditions import Condition
from ropestudy.engine import Pair, Row, Stream, column_logits, compare
from ropestudy.measures import DivergenceSample, Sample, sample
from ropestudy.models import Pretrained, variant
from ropestudy.spec import StudyConfig

# What shows numbers, or tests them, does not change them.
SHOWS_ONLY = {"tests", "report", "cli.py", "mask_figure.py"}
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tokenizers", "gguf", "pydantic")


@dataclass(frozen=True)
class RunsOf:
    """A stream of `engine.compare`: a condition, whose positions are the row's under `mask` plus each shift."""

    condition: Condition
    shifts: tuple[int, ...]
    mask: str | None = None  # None: the cell's own


@dataclass(frozen=True)
class Cell:
    """What is computed on one row.

    bos: where it stands; packed rows (`documents` of them) always open with it. sink: the conditions' method has one, whose
    logits are column 0's mean under `exact` on the same row with the BOS first. keep: pairs whose columns are kept.
    """

    experiment: str
    model: str
    number: int  # of the sequence
    tokens: int
    streams: tuple[RunsOf, ...]
    pairs: tuple[Pair, ...]
    divergences: tuple[tuple[tuple[int, int], tuple[int, int]], ...] = ()
    bos: text.Bos = "first"
    mask: str = "full"
    documents: int | None = None
    sink: bool = False
    keep: tuple[int, ...] = ()


class CellResult(BaseModel):
    """One sample for each pair and each divergence, in their order."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: list[Sample]
    divergences: list[DivergenceSample]
    lengths: tuple[int, ...]  # of the row's documents
    seconds: float


@dataclass(frozen=True)
class Job:
    """Cells, and the records that their results, in the same order, become once all are there."""

    cells: list[Cell]
    records: Callable[[list[CellResult]], list[Any]]


def per_sequence(cell: Cell, sequences: int) -> list[Cell]:
    """The cell for each sequence."""
    return [replace(cell, number=number) for number in range(sequences)]


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: str
    result: CellResult


class Bench:
    """Computes cells: holds the model, its variants (the latest alone) and the text."""

    def __init__(self, config: StudyConfig, pretrained: Pretrained, pool: text.Pool):
        self.config, self.pretrained, self.pool = config, pretrained, pool
        self._latest: tuple[str, Decoder] | None = None

    def run(self, cell: Cell) -> CellResult:
        """Compute a cell."""
        started = time.perf_counter()
        decoder, made = self._decoder(cell.model), self._row(cell, cell.mask)
        sinks_LH = None
        if cell.sink:
            with_bos = text.row(self.pool, cell.number, cell.tokens, self.pretrained.bos, "first")
            plain = Row(with_bos.ids, with_bos.documents)
            sinks_LH = column_logits(decoder, plain, with_bos.positions, 0, self.config.block)
        streams = []
        for runs in cell.streams:
            base = made if runs.mask is None else self._row(cell, runs.mask)
            assert np.array_equal(base.documents, made.documents), "runs of other documents are not the same function"
            streams.append(Stream(runs.condition, base.positions + np.array(runs.shifts)[:, None]))
        row = Row(made.ids, made.documents, sinks_LH)
        sums, divergences = compare(decoder, row, streams, cell.pairs, cell.divergences, self.config.block)
        samples = [sample(one, made.documents) for one in sums]
        samples = [one if i in cell.keep else one.model_copy(update={"columns": {}}) for i, one in enumerate(samples)]
        return CellResult(
            samples=samples,
            divergences=divergences,
            lengths=made.lengths,
            seconds=time.perf_counter() - started,
        )

    def key(self, cell: Cell) -> str:
        """A hash of everything that the cell's numbers depend on."""
        digest = hashlib.sha256(f"{cell!r} {self.config.block} {self.config.seed}".encode())
        digest.update(
            f"{self.pretrained.sha256} {self.config.model.weights} {self.pretrained.bos} {fingerprint()}".encode()
        )
        for ids in self.pool.ids:
            digest.update(ids.tobytes())
        return digest.hexdigest()

    def kept_or_run(self, cell: Cell, folder: Path) -> CellResult:
        """The cell from its file, or computed and written there, beside and renamed."""
        key = self.key(cell)
        path = folder / f"{cell.experiment}-{key[:24]}.json"
        try:
            kept = _Kept.model_validate_json(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValidationError, UnicodeDecodeError):
            kept = None
        if kept is None or kept.key != key:
            kept = _Kept(key=key, result=self.run(cell))
            folder.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.partial")
            partial.write_text(kept.model_dump_json(), encoding="utf-8")
            partial.replace(path)
        return kept.result

    def _decoder(self, name: str) -> Decoder:
        if name == "pretrained":
            return self.pretrained.decoder
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # before the next one is made: two would not fit where one does
            self._latest = (name, variant(self.pretrained, name, self.config.seed))
        return self._latest[1]

    def _row(self, cell: Cell, mask: str) -> text.RowArrays:
        bos_id = self.pretrained.bos
        if cell.documents is None:
            bos = cell.bos if self.config.text.bos == "first" else "none"
            return text.row(self.pool, cell.number, cell.tokens, bos_id, bos)
        assert bos_id is not None
        return text.packed_row(self.pool, cell.number, cell.tokens, bos_id, cell.documents, mask)


@cache
def fingerprint() -> str:
    """Return a hash of the sources, the libraries and the device: a cell is computed anew when one of them changes."""
    digest = hashlib.sha256(f"{platform.python_version()} {versions()} {jax.devices()[0].device_kind}".encode())
    for file in sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def sources() -> list[Path]:
    """Return the files that a cell's numbers come out of: the oracle's and the study's, but for what shows or tests."""
    roots = [Path(package.__path__[0]) for package in (jaxref, ropestudy)]
    files = [(root, file) for root in roots for file in sorted(root.rglob("*.py"))]
    return [file for root, file in files if not SHOWS_ONLY & set(file.relative_to(root).parts)]


def versions() -> dict[str, str]:
    """Of the libraries the numbers come through, and of this package."""
    found = {}
    for name in (*LIBRARIES, "anchorline"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
