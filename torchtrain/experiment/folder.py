"""Where an experiment lies."""

from dataclasses import dataclass
from pathlib import Path

from torchtrain.experiment.spec import PairedRun


@dataclass(frozen=True)
class Folder:
    """An experiment's folder."""

    path: Path

    @property
    def experiment(self) -> Path:
        """What is run, every default written out."""
        return self.path / "experiment.yaml"

    @property
    def train(self) -> Path:
        """The pieces that are trained on."""
        return self.path / "corpus" / "train.jsonl"

    @property
    def measured(self) -> Path:
        """The documents that are measured on."""
        return self.path / "corpus" / "measured.jsonl"

    @property
    def rows(self) -> Path:
        """What every model is given to measure it."""
        return self.path / "corpus" / "rows.json"

    @property
    def lock(self) -> Path:
        """Held by the one process that is at work."""
        return self.path / "lock"

    def run(self, cell: PairedRun) -> Path:
        """The folder of a run."""
        return self.path / "runs" / cell.name

    def log(self, cell: PairedRun) -> Path:
        """What a run's processes say."""
        return self.path / "logs" / f"{cell.name}.log"

    def config(self, cell: PairedRun) -> Path:
        """The config of a run."""
        return self.path / "configs" / f"{cell.name}.yaml"

    def measurement(self, cell: PairedRun, step: int) -> Path:
        """What was measured of a run after a step."""
        return self.path / "measured" / f"{cell.name}-step-{step}.json"

    def clear(self) -> None:
        """Remove what was left on the way to `experiment`, which comes last: it may be of something else."""
        if not self.experiment.is_file():
            for file in (self.train, self.measured, self.rows):
                file.unlink(missing_ok=True)
