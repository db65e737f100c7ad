"""What is kept of a sequence: written as soon as it is finished, read instead of made again."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from anchorline.files import replace_file


class OfRow(BaseModel):
    """What is kept of one sequence."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    seconds: float


Kept = TypeVar("Kept", bound=OfRow)


def kept_or_made(path: Path, kind: type[Kept], make: Callable[[], Kept]) -> Kept:
    """From its file, or computed and written there, beside and renamed."""
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValidationError, UnicodeDecodeError):
        found = make()
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, found.model_dump_json().encode())
    return found
