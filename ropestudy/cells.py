"""A cell is the smallest piece of a study that is computed and kept. An experiment asks for cells and makes records."""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
from pydantic import BaseModel, ConfigDict, ValidationError

import jaxref
import ropestudy
from anchorline.environment import versions
from anchorline.files import replace_file
from jaxref.model import Decoder
from ropestudy import text
from ropestudy.compute.measures import DivergenceSample, Sample
from ropestudy.models import Pretrained, variant
from ropestudy.schema import AnyRecord
from ropestudy.spec import StudyConfig

# Files and folders of the two packages that only show numbers or test them.
SHOWS_ONLY = {"tests", "report", "cli.py"}
LIBRARIES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "tokenizers", "gguf", "pydantic", "anchorline")


class CellResult(BaseModel):
    """The samples of all comparisons of attention, and of all comparisons of outputs, in the order of the cell."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: list[Sample] = []
    divergences: list[DivergenceSample]
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


class Question(NamedTuple):
    """Cells that answer one question of an experiment, and what makes records of their results, in the same order."""

    cells: Sequence[Cell]
    make_records: Callable[[list[CellResult]], Sequence[AnyRecord]]


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
        """Return a digest of everything that the cell's numbers depend on."""
        digest = hashlib.sha256(f"{cell!r} {self.config.block} {self.config.seed}".encode())
        digest.update(f"{self.pretrained.sha256} {self.pretrained.bos} {digest_of_code()}".encode())
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
def digest_of_code() -> str:
    """Return a digest of the sources, libraries and device: a cell is computed again when one of them changes."""
    digest = hashlib.sha256(f"{versions(LIBRARIES)} {jax.devices()[0].device_kind}".encode())
    for root in (Path(package.__path__[0]) for package in (jaxref, ropestudy)):
        for file in sorted(root.rglob("*.py")):
            if not SHOWS_ONLY & set(file.relative_to(root).parts):
                digest.update(file.read_bytes())
    return digest.hexdigest()
