"""What a run has left for use, and whether that is all: `outputs.json`, every exported file by size and SHA-256.

A folder is written down before it takes its name, so none stands there unlisted; and that the run is finished is
written last.
"""

import re
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from anchorline.errors import UserError
from anchorline.files import DELETED, FileEntry, read_json, replace_file
from torchtrain.checkpoint.folder import STEP

MODEL = "model"
_MOST_BYTES = 1 << 24
_FOLDER = re.compile(rf"{MODEL}|exports/{STEP.pattern}")
_ASIDE = re.compile(rf"(?:{_FOLDER.pattern}){re.escape(DELETED)}(?:-\d+)?")


class Outputs(BaseModel):
    """What stands in `outputs.json`; one that is not there says nothing.

    `models` holds the files of each exported folder, by their path in it; `writing` the folder that is being exported,
    whose partial one belongs to the run with all that is in it; `removing` what one is called while it is removed;
    `finished` the steps of a run that has left everything.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    models: dict[str, dict[str, FileEntry]] = {}
    writing: str | None = None
    removing: str | None = None
    finished: int | None = None

    @model_validator(mode="after")
    def _stays_in_the_folder(self) -> Self:
        for folder in [*self.models, *([] if self.writing is None else [self.writing])]:
            if not _FOLDER.fullmatch(folder):
                raise ValueError(f"{folder!r} is not a folder of an export")
        if self.removing is not None and not _ASIDE.fullmatch(self.removing):
            raise ValueError(f"{self.removing!r} is not a folder of an export that is removed")
        for name in (name for files in self.models.values() for name in files):
            if name != Path(name).as_posix() or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise ValueError(f"{name!r} is not the name of a file")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file.

        Raises:
            UserError: it is damaged.
        """
        try:
            path.lstat()
        except FileNotFoundError:
            return cls()
        content = read_json(path, most=_MOST_BYTES)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(f"{path}: is damaged: {place} {error.errors()[0]['msg']}"[:400]) from None

    def write(self, path: Path, **changes: Any) -> None:
        """Write the file with some of it changed, and change it here.

        Raises:
            OSError: what the system says.
        """
        for name, value in changes.items():
            setattr(self, name, value)
        self.models = dict(
            sorted(self.models.items())
        )  # a model that was forgotten and made again leaves the same bytes
        replace_file(path, (self.model_dump_json(indent=1) + "\n").encode())
