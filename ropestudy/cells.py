"""A cell: the smallest piece of a study that is computed and kept. One row, some conditions, many pairs.

Streams, pairs and divergences of a cell have names. An experiment gives the names and looks its results up by them.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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
from ropestudy.compute.measures import DivergenceSample, Sample, Sums, difference, divergence, sample
from ropestudy.models import Pretrained, variant
from ropestudy.schema import AnyRecord, Difference, Mode, OutputDivergence
from ropestudy.spec import StudyConfig

# What shows numbers, or tests them, does not change them.
SHOWS_ONLY = {"tests", "report", "cli.py", "mask_figure.py"}
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tokenizers", "gguf", "pydantic", "anchorline")

# Names that experiments share: of float64's stream; of a condition at one shift against itself at another, and against
# float64.
TRUTH, SHIFT, ERROR = "truth", "shift", "error"


@dataclass(frozen=True)
class RunsOf:
    """A stream of `engine.compare` under a name: a condition, whose positions are the row's under `mask` plus each
    shift.

    The run at the first shift gives the inputs of the mode `local`.
    """

    name: str
    condition: Condition
    shifts: tuple[int, ...]
    mask: str | None = None  # None: the cell's own


class RunAt(NamedTuple):
    """A run of a cell: a stream's name, and one of its shifts."""

    stream: str
    shift: int


@dataclass(frozen=True)
class NamedPair:
    """Two runs whose attentions are compared, as `engine.Pair`, and the name of their sample."""

    name: str
    a: RunAt
    b: RunAt
    mode: Mode
    keep_columns: bool = False


@dataclass(frozen=True)
class NamedDivergence:
    """Two runs, the outputs of `p` and those of `q` from which they diverge, and the name of their sample."""

    name: str
    p: RunAt
    q: RunAt


@dataclass(frozen=True)
class Cell:
    """What is computed on one row.

    documents: in a packed row, which always opens with the BOS.
    """

    experiment: str
    model: str
    number: int  # of the sequence
    tokens: int
    streams: tuple[RunsOf, ...]
    pairs: tuple[NamedPair, ...]
    divergences: tuple[NamedDivergence, ...] = ()
    mask: str = "full"
    documents: int | None = None
    gap: int = 0  # between the positions of the row's two halves

    def __post_init__(self) -> None:
        for named in (self.streams, self.pairs, self.divergences):
            assert len({one.name for one in named}) == len(named), "two of a cell have the same name"

    @property
    def conditions(self) -> list[str]:
        """Names, for whoever waits."""
        return list(dict.fromkeys(runs.condition.name for runs in self.streams))

    def run(self, bench: "Bench") -> "CellResult":
        """Compute it."""
        return bench.compare(self)

    def find(self, run: RunAt) -> Run:
        """Return the index of a run's stream, and its own within the stream."""
        place = [stream.name for stream in self.streams].index(run.stream)
        return Run(place, self.streams[place].shifts.index(run.shift))


class AnyCell(Protocol):
    """What a bench runs and keeps: see `Cell`. Its repr and the bench's own say all that its numbers depend on."""

    experiment: str
    model: str
    tokens: int
    number: int

    @property
    def conditions(self) -> list[str]:
        """Names, for whoever waits."""
        ...

    def run(self, bench: "Bench") -> "CellResult":
        """Compute it."""
        ...


class CellResult(BaseModel):
    """A sample of each pair and of each divergence, by name."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: dict[str, Sample]
    divergences: dict[str, DivergenceSample]
    lengths: tuple[int, ...]  # of the row's documents
    seconds: float = 0.0


class Question(NamedTuple):
    """Cells that answer one question of an experiment, and what makes records of their results, in the same order."""

    cells: Sequence[Any]
    make_records: Callable[[list[CellResult]], list[AnyRecord]]


def per_sequence(cell: Cell, sequences: int) -> list[Cell]:
    """Return the cell for each sequence."""
    return [replace(cell, number=number) for number in range(sequences)]


def difference_of(results: Iterable[CellResult], pair: str) -> Difference:
    """Return one pair over all sequences."""
    return difference([result.samples[pair] for result in results])


def divergence_of(results: Iterable[CellResult], name: str) -> OutputDivergence:
    """Return one divergence over all sequences."""
    return divergence([result.divergences[name] for result in results])


class _Kept(BaseModel):
    model_config = ConfigDict(extra="forbid")

    key: str
    result: CellResult


class Bench:
    """Computes cells: holds the model, its variants (the latest alone) and the text."""

    def __init__(self, config: StudyConfig, pretrained: Pretrained, pool: text.Pool):
        self.config, self.pretrained, self.pool = config, pretrained, pool
        self._latest: tuple[str, Decoder] | None = None

    def run(self, cell: "AnyCell") -> CellResult:
        """Compute a cell."""
        started = time.perf_counter()
        return cell.run(self).model_copy(update={"seconds": time.perf_counter() - started})

    def compare(self, cell: Cell) -> CellResult:
        """Compare the attention of a cell's pairs."""
        decoder, made = self.decoder(cell.model), self._row(cell, cell.mask)
        streams = []
        for runs in cell.streams:
            base = made if runs.mask is None else self._row(cell, runs.mask)
            assert np.array_equal(base.documents, made.documents), "runs of other documents are not the same function"
            positions_T = text.open_gap(base.positions, cell.gap)
            streams.append(Stream(runs.condition, positions_T + np.array(runs.shifts)[:, None]))
        row = Row(made.ids, made.documents, made.targets)
        pairs = [Pair(cell.find(one.a), cell.find(one.b), one.mode) for one in cell.pairs]
        ends = [(cell.find(one.p), cell.find(one.q)) for one in cell.divergences]
        sums, divergences = compare(decoder, row, streams, pairs, ends, self.config.block)
        return CellResult(
            samples={
                one.name: _sample(found, made.documents, one.keep_columns)
                for one, found in zip(cell.pairs, sums, strict=True)
            },
            divergences={one.name: found for one, found in zip(cell.divergences, divergences, strict=True)},
            lengths=made.lengths,
        )

    def key(self, cell: "AnyCell") -> str:
        """Return a hash of everything that the cell's numbers depend on."""
        digest = hashlib.sha256(f"{cell!r} {self.config.block} {self.config.seed}".encode())
        digest.update(
            f"{self.pretrained.sha256} {self.config.model.weights} {self.pretrained.bos} {fingerprint()}".encode()
        )
        for ids in self.pool.ids:
            digest.update(ids.tobytes())
        return digest.hexdigest()

    def kept_or_run(self, cell: "AnyCell", folder: Path) -> CellResult:
        """Return the cell from its file, or compute it and write that."""
        key = self.key(cell)
        path = folder / f"{cell.experiment}-{key[:24]}.json"
        try:
            kept = _Kept.model_validate_json(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValidationError, UnicodeDecodeError):
            kept = None
        if kept is None or kept.key != key:
            kept = _Kept(key=key, result=self.run(cell))
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(path, kept.model_dump_json().encode())
        return kept.result

    def decoder(self, name: str) -> Decoder:
        """Return a model by name."""
        if name == "pretrained":
            return self.pretrained.decoder
        if self._latest is None or self._latest[0] != name:
            self._latest = None  # before the next one is made: two would not fit where one does
            self._latest = (name, variant(self.pretrained, name, self.config.seed))
        return self._latest[1]

    def _row(self, cell: Cell, mask: str) -> text.RowArrays:
        bos_id = self.pretrained.bos
        if cell.documents is None:
            return text.row(self.pool, cell.number, cell.tokens, bos_id, self.config.text.bos)
        assert bos_id is not None
        return text.packed_row(self.pool, cell.number, cell.tokens, bos_id, cell.documents, mask)


def _sample(sums: Sums, documents_T: np.ndarray, keep_columns: bool) -> Sample:
    found = sample(sums, documents_T)
    return found if keep_columns else found.model_copy(update={"columns": {}})


@cache
def fingerprint() -> str:
    """Return a hash of the sources, the libraries and the device: a cell is computed again when one of them changes."""
    digest = hashlib.sha256(f"{versions(LIBRARIES)} {jax.devices()[0].device_kind}".encode())
    for file in sources():
        digest.update(file.read_bytes())
    return digest.hexdigest()


def sources() -> list[Path]:
    """Return the files that a cell's numbers come out of: the oracle's and the study's, but for what shows or tests."""
    roots = [Path(package.__path__[0]) for package in (jaxref, ropestudy)]
    files = [(root, file) for root in roots for file in sorted(root.rglob("*.py"))]
    return [file for root, file in files if not SHOWS_ONLY & set(file.relative_to(root).parts)]
