"""The folder of a run's checkpoints, without what stands in their tensors: which there are, which look good, which go.

Needs no torch: `torchtrain status` answers at once.
"""

import os
import re
from pathlib import Path

from anchorline.errors import UserError, disk_fault
from anchorline.files import DELETED, PARTIAL, FileEntry, differs, remove, set_aside
from torchtrain.checkpoint.manifest import DamageError, Manifest

STEP = re.compile(r"step-\d{8,19}")
# Files of a checkpoint.
OWN = re.compile(r"manifest\.json|state-\d{5,}-\d{3,}\.safetensors|rng-\d{5,}\.safetensors")
_LEFT = re.compile(rf"{STEP.pattern}(?:{re.escape(PARTIAL)}|{re.escape(DELETED)}(?:-\d+)?)")


class CheckpointFolder:
    """The folder of a run's checkpoints. Making the object touches nothing.

    Args:
        folder: `checkpoints` in the run's folder; every rank sees the same one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in their order, whatever the clock said when they were written.

        Raises:
            UserError: there is something in the folder's place, and it cannot be looked into.
        """
        return sorted(
            step_of(name) for name in self._names() if STEP.fullmatch(name) and name == self.path(step_of(name)).name
        )

    def give_up(self) -> None:
        """Where the checkpoints cannot be reached, rename what stands in the folder's place. Only for who begins anew.

        Raises:
            OSError: what the system says.
        """
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            set_aside(self.folder)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for who holds the run's lock.

        Raises:
            OSError: what the system says.
        """
        for name in self._names():
            if _LEFT.fullmatch(name):
                remove_checkpoint(self.folder / name)

    def retain(self, keep: int, new: int) -> None:
        """Remove what is older than the last `keep` good ones, never the one just saved or taken up. Damaged ones
        between them stay, for who wants to look. Only for who holds the run's lock.

        Raises:
            UserError: one cannot be removed.
        """
        good = [step for step in self.steps() if self.looks_good(step)]
        try:
            for step in self.steps():
                if len(good) >= keep and step < good[-keep] and step != new:
                    _discard(self.path(step))
        except OSError as error:
            raise UserError(
                f"{self.path(new)}: is saved, but an older checkpoint could not be removed: {disk_fault(error)}; "
                f"mend that, then: torchtrain resume {self.folder.parent}"
            ) from None

    def looks_good(self, step: int) -> bool:
        """Whether a checkpoint has its manifest and files of the right sizes; their content is not read."""
        try:
            for name, entry in Manifest.read(self.path(step)).files.items():
                check_file(self.path(step) / name, entry, whole=False)
        except (DamageError, OSError):
            return False
        return True

    def forget_after(self, step: int) -> None:
        """Remove the checkpoints of all later steps: the run is taken up at this one, and theirs is another future.

        Only for who holds the run's lock. The last one goes first, so that an interruption leaves a run of the same
        past.
        """
        for later in reversed(self.steps()):
            if later > step:
                _discard(self.path(later))

    def _names(self) -> list[str]:
        """Return the names of all that the folder holds, nothing where there is none."""
        try:
            return os.listdir(self.folder)
        except FileNotFoundError:
            if not self.folder.is_symlink():
                return []
            why = f"is a link to {os.readlink(self.folder)}, which is not there"
        except OSError as error:
            why = f"cannot be looked into: {str(error.strerror).lower()}"
        raise UserError(
            f"{self.folder}: {why}; mount its disk, or begin anew: torchtrain resume {self.folder.parent} --step 0"
        )


def step_of(name: str) -> int:
    """Return the step of a folder's name that `STEP` fits."""
    return int(name.partition("-")[2])


def check_file(path: Path, entry: FileEntry, whole: bool = True) -> None:
    """Refuse a file that is not what its entry says; unless `whole`, by its size alone.

    Raises:
        DamageError: says how it differs.
    """
    if (fault := differs(path, entry, whole)) is not None:
        raise DamageError(f"{path}: {fault}")


def _discard(folder: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that a crash never leaves a part of it under that name."""
    remove_checkpoint(set_aside(folder))


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint's files and, where nothing else is in it, its folder. What a link leads to stays."""
    if not folder.is_symlink() and folder.is_dir():
        remove(folder, filter(OWN.fullmatch, os.listdir(folder)))
