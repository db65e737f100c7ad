"""The file that holds an experiment's measurements: JSON, a line for each run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json, replace_file
from torchtrain.experiment.recall import Measurement
from torchtrain.experiment.spec import Run, TrainingExperiment, other_setting

Gate = dict[str, Any]  # `bases`: the recall of each


@dataclass
class Measurements:
    """What has been measured so far. `experiment` is dumped: cells and seeds may become more."""

    file: Path
    experiment: dict[str, Any]
    measured: dict[str, Measurement]  # by the names of runs
    gate: Gate | None = None

    def of(self, experiment: TrainingExperiment) -> dict[Run, Measurement]:
        """Return the measurements of an experiment's runs."""
        return {run: self.measured[run.name] for run in experiment.runs() if run.name in self.measured}

    def forget_unfinished_seeds(self, experiment: TrainingExperiment) -> None:
        """Remove the measurements of each seed that lacks some of the experiment's runs."""
        unfinished = {run.seed for run in experiment.runs() if run.name not in self.measured}
        for run in experiment.runs():
            if run.seed in unfinished:
                self.measured.pop(run.name, None)

    def save(self) -> None:
        """Write the file."""
        about = [f'"experiment": {json.dumps(self.experiment)},']
        about += [f'"gate": {json.dumps(self.gate)},'] if self.gate is not None else []
        lines = [f'"{name}": {one.model_dump_json()}' for name, one in sorted(self.measured.items())]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.file, "\n".join(["{", *about, '"measured": {', ",\n".join(lines), "}}", ""]).encode())


def read_measurements(experiment: TrainingExperiment, file: Path) -> Measurements:
    """Read an experiment's file, or begin one where there is none.

    Raises:
        UserError: it is of another experiment, or damaged.
    """
    dumped = experiment.model_dump(mode="json")
    if not file.is_file():
        return Measurements(file, dumped, {})
    content = read_json(file, "--results")
    if other := other_setting(experiment, content.get("experiment", {})):
        raise UserError(f"--results {quoted(file)}: is of an experiment with another {other}; choose another file")
    try:
        measured = {name: Measurement.model_validate(one) for name, one in content.get("measured", {}).items()}
    except ValueError as error:
        raise UserError(f"--results {quoted(file)}: is damaged ({quoted_reason(error)})") from None
    return Measurements(file, dumped, measured, content.get("gate"))
