"""A folder that appears complete, or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anchorline.errors import UserError, quoted
from anchorline.files import build_folder


def check_new(field: str, folder: Path) -> None:
    """Refuse a folder that cannot be made. field: what the message names.

    Raises:
        UserError: something has the name, or it would stand in a folder that does not exist.
    """
    if os.path.lexists(folder):
        raise UserError(f"{field}: {quoted(folder)} exists; give a new one")
    if not folder.parent.is_dir():
        raise UserError(f"{field}: {quoted(folder.parent)} is not a folder; make it first")


@contextmanager
def write_folder(folder: Path) -> Iterator[Path]:
    """Yield the path, of nothing yet, at which a folder is to be made; renamed, it is `folder`. What fails leaves
    nothing behind.

    Raises:
        UserError: see `check_new`.
        OSError: what the system says, such as a full disk.
    """
    check_new("folder", folder)
    with build_folder(folder) as beside:
        yield beside
