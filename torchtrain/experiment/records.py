"""What an experiment has measured, as one file: to be published, and to be gone on from on another machine.

A run's stage that stands there is not trained and measured again. Weights are not in it: a later stage of the same run
is trained from the start.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr

from anchorline import settings
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json, replace_file
from torchtrain.experiment.folder import Folder
from torchtrain.experiment.measuring import Measurement
from torchtrain.experiment.spec import ARITHMETICS, PairedRun, TrainingExperiment, Variant, other_setting

NAME = "measurements.json"
_MOST_BYTES = 1 << 28
_NAME = re.compile(rf"({'|'.join(ARITHMETICS)})-({'|'.join(get_args(Variant))})-\d+-step-\d+")


class Records(BaseModel):
    """Every measurement of an experiment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    experiment: dict[str, Any]  # what is run, every default written out
    measured: dict[str, Measurement]  # by run and step: float32-anchor-0-step-32
    _path: Path = PrivateAttr()

    @property
    def said(self) -> str:
        """The option that named its file, for messages."""
        return f"--measured {quoted(self._path)}"


def write_records(
    experiment: TrainingExperiment, measured: Mapping[tuple[PairedRun, int], Measurement], path: Path
) -> None:
    """Write what has been measured, a measurement a line."""
    what = json.dumps(experiment.model_dump(mode="json"))
    lines = [f'"{cell.name}-step-{step}": {of.model_dump_json()}' for (cell, step), of in measured.items()]
    text = "\n".join([f'{{"experiment": {what},', '"measured": {', ",\n".join(lines), "}}", ""])
    replace_file(path, text.encode())


def read_records(experiment: TrainingExperiment, path: Path) -> Records:
    """Read what `write_records` wrote.

    Raises:
        UserError: it cannot be read, is damaged, or is of another experiment.
    """
    content = read_json(path, "--measured", _MOST_BYTES)
    try:
        records = Records.model_validate_json(json.dumps(content))
    except ValueError as error:
        raise UserError(
            f"--measured {quoted(path)}: is damaged, or no {NAME} of an experiment ({quoted_reason(error)})"
        ) from None
    records._path = path
    if other := other_setting(experiment, records.experiment):
        raise UserError(f"{records.said}: is of an experiment with another {other}; measure anew without it")
    for name, of in records.measured.items():
        if _NAME.fullmatch(name) is None:
            raise UserError(f"{records.said}: {quoted(name)} is the name of no run and step; remove it there")
        if fault := of.fault(experiment.measure):
            raise UserError(f"{records.said}: {name} has {fault}; remove it there")
    return records


def take_over(experiment: TrainingExperiment, folder: Folder, records: Records, documents: str | None = None) -> None:
    """Put into an experiment's folder what was measured elsewhere and is not measured in it.

    Args:
        experiment: of the folder and of the records.
        folder: new and clear, or of the same experiment (`check_folder`), and this process's alone.
        records: `read_records`.
        documents: digest of those that the folder's models are measured on; None: they are not made.

    Raises:
        UserError: the records are of other documents, or of several.
    """
    known = {of.documents for of in records.measured.values()}
    if len(known | {documents} - {None}) > 1:
        raise UserError(f"{records.said}: is of other documents than corpus gives here; measure anew without it")
    if not folder.experiment.is_file():
        replace_file(folder.experiment, settings.dump(experiment.model_dump(mode="json")).encode())
    for step in experiment.stages:
        for cell in experiment.cells():
            found = records.measured.get(f"{cell.name}-step-{step}")
            if found is not None and not (file := folder.measurement(cell, step)).is_file():
                file.parent.mkdir(exist_ok=True)
                replace_file(file, found.model_dump_json().encode())
