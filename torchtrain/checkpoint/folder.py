"""The folder of a run's checkpoints: which there are, which look whole, which are removed. It needs no torch."""

import os
import re
from pathlib import Path

from anchorline.errors import UserError, disk_fault
from anchorline.files import DELETED, PARTIAL, FileEntry, differs, remove_tree, set_aside
from torchtrain.checkpoint.manifest import DamageError, Manifest

STEP = re.compile(r"step-\d{8,19}")
_LEFT = re.compile(rf"{STEP.pattern}(?:{re.escape(PARTIAL)}|{re.escape(DELETED)}(?:-\d+)?)")


class CheckpointFolder:
    """The folder of a run's checkpoints, the same on every rank. Creating the object touches nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in their order. Raises OSError: the folder cannot be read."""
        return sorted(step_of(name) for name in self._names() if STEP.fullmatch(name))

    def looks_whole(self, step: int) -> bool:
        """Whether a checkpoint has its manifest and files of the right sizes. Their content is not read."""
        try:
            for name, entry in Manifest.read(self.path(step)).files.items():
                check_file(self.path(step) / name, entry, whole=False)
        except (DamageError, OSError):
            return False
        return True

    def retain(self, keep: int, new: int) -> None:
        """Remove checkpoints older than the last `keep` whole ones, but not `new`; under the lock. Raises UserError."""
        whole = [step for step in self.steps() if self.looks_whole(step)]
        try:
            for step in self.steps():
                if len(whole) >= keep and step < whole[-keep] and step != new:
                    self._remove(step)
        except OSError as error:
            raise UserError(
                f"{self.path(new)}: is saved, but an older checkpoint could not be removed: {disk_fault(error)}; "
                f"correct that, then: torchtrain resume {self.folder.parent}"
            ) from None

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps, the last one first. Only for the process that holds the run's lock."""
        for later in reversed(self.steps()):
            if later > step:
                self._remove(later)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for the process that holds the run's lock."""
        for name in self._names():
            if _LEFT.fullmatch(name):
                remove_tree(self.folder / name)

    def _remove(self, step: int) -> None:
        """Rename a checkpoint, then remove it: a crash never leaves a part of it under its name."""
        remove_tree(set_aside(self.path(step)))

    def _names(self) -> list[str]:
        return os.listdir(self.folder) if os.path.lexists(self.folder) else []


def step_of(name: str) -> int:
    """Return the step of a folder's name that `STEP` fits."""
    return int(name.partition("-")[2])


def check_file(path: Path, entry: FileEntry, whole: bool = True) -> None:
    """Check a file against its entry; unless `whole`, only its size. Raises DamageError: says how it differs."""
    if (fault := differs(path, entry, whole)) is not None:
        raise DamageError(f"{path}: {fault}")
