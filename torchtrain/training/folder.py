"""The run's folder: refused if it holds anything, made only when everything is checked, removed only if it is a run."""

import json
import os
import platform
import shutil
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from anchorline.errors import UserError
from anchorline.files import DELETED, PARTIAL, FileEntry, commit, discard, entry_of, expanded, sweep, write_file
from torchtrain.checkpoint.lock import at_work, hold, is_held
from torchtrain.checkpoint.manifest import versions
from torchtrain.config import Config, dump_config

_MADE_BY = "torchtrain train"
_ATTEMPTS, _SECONDS_BETWEEN = 10, 0.5


class RunFolder:
    """Paths of a run. Making the object touches nothing.

    Args:
        path: `run.folder`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = expanded(path)
        self.record = self.path / "run.json"  # also what a run is recognised by
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.timing = self.path / "timing.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.exports = self.path / "exports"
        self.bad_steps = self.path / "bad_steps"
        self.tensorboard = self.path / "tensorboard"
        self.wandb = self.path / "wandb"
        self.plot = self.path / "loss.png"
        self.model = self.path / "model"
        self.leftovers = [path.with_name(path.name + PARTIAL) for path in (self.plot, self.model)]
        self.leftovers.append(self.model.with_name(self.model.name + DELETED))

    def check(self, replace: bool, cache: str | Path) -> None:
        """Refuse a place that cannot take a run.

        Args:
            replace: whether a run that stands there may be removed.
            cache: `data.cache`, which must stand elsewhere: a run finds its folder empty, and is removed with it.

        Raises:
            UserError: it is a file, or a folder that holds something: a run without `replace`, one that a process is at work
                in or that holds files of others, or anything else. Or it cannot be written, or holds the cache.
        """
        try:
            self._check_writable()
            self._check_content(replace)
        except OSError as error:
            raise self._unwritable(error) from None
        if Path(os.path.realpath(expanded(cache))).is_relative_to(os.path.realpath(self.path)):
            raise UserError(f"data.cache {str(cache)!r}: stands in run.folder {self.path}; choose a folder outside it")

    def _check_writable(self) -> None:
        """Make and remove a folder where ours will stand: permissions alone do not tell (root, read-only disks, /proc)."""
        nearest = next(parent for parent in self.path.absolute().parents if os.path.lexists(parent))
        os.rmdir(tempfile.mkdtemp(dir=nearest))

    def _check_content(self, replace: bool) -> None:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_dir()):
            raise UserError(f"run.folder {self.path}: exists and is no folder; choose another")
        if self.path.is_dir() and any(self.path.iterdir()):
            if not self._is_run():
                raise UserError(f"run.folder {self.path}: holds files and is not recognised as a run; choose another")
            if not replace:
                raise UserError(f"run.folder {self.path}: already holds a run; choose another, or --replace it")
            if strange := self._strange():
                raise UserError(
                    f"run.folder {self.path}: holds {strange[0]}, which is not recognised as a run's; "
                    "move it elsewhere before the run is replaced"
                )
            if is_held(self.record):
                raise UserError(at_work(self.record))

    def create(self, config: Config, record: dict[str, Any], replace: bool) -> None:
        """Make the folder with its record and resolved config, removing a run that is to be replaced.

        It is made beside its place and renamed, so it is there as a run or not at all; so is the one that it replaces.

        Raises:
            UserError: as `check`; the folder cannot be made; or a process is at work in the run that is there.
        """
        self.check(replace, config.data.cache)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{self.path.name}{PARTIAL}-", dir=self.path.parent))
            try:
                content = json.dumps(_identity() | {"config": config.model_dump(mode="json")} | record, indent=2) + "\n"
                write_file(partial / self.record.name, content.encode())
                write_file(partial / self.config.name, dump_config(config).encode())
                partial.chmod(0o777 & ~_umask())
                with hold(self.record) if self.record.exists() else nullcontext():
                    commit(partial, self.path)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        except OSError as error:
            raise self._unwritable(error) from None

    def check_run(self) -> dict[str, Any]:
        """Return the record of the run that stands here.

        Raises:
            UserError: there is none.
        """
        if not self.path.is_dir() or not self._is_run():
            raise UserError(f"{self.path}: holds no run of ours; give the folder of one (run.folder in its config)")
        return json.loads(self.record.read_text(encoding="utf-8"))

    def check_shared(self, record: FileEntry) -> None:
        """Check that this rank sees the run that rank 0 does.

        Args:
            record: `run.json` as rank 0 sees it.

        Raises:
            UserError: it does not.
        """
        for attempt in range(_ATTEMPTS):
            with suppress(OSError):
                if entry_of(self.record) == record:
                    return
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_SECONDS_BETWEEN)  # a network's disk may show a new folder late
        raise UserError(
            f"run.folder {self.path}: the run is not to be seen on {platform.node()}; run.folder must be on a disk "
            "that all nodes share"
        )

    def forget_after(self, step: int, last: int) -> None:
        """Remove the models of later steps: the run is taken up at this one, and theirs is another future.

        Args:
            step: steps done.
            last: steps of the whole run; the trained model is of these.

        Raises:
            OSError: what the system says.
        """
        if step < last and self.model.is_dir():
            discard(self.model)
        for path in self.exports.glob("step-????????"):
            if int(path.name.removeprefix("step-")) > step:
                discard(path)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for who holds the run's lock.

        Raises:
            OSError: what the system says.
        """
        for folder in (self.checkpoints, self.exports):
            sweep(folder)
        for path in self.leftovers:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    @property
    def finished(self) -> bool:
        """Whether the run has left everything: the plot comes last."""
        return self.model.is_dir() and self.plot.is_file()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"run.folder {self.path}: {error.strerror}; choose a folder that can be written")

    def _is_run(self) -> bool:
        """A run has our record; what else lies there, such as a scheduler's log, does not matter to it."""
        try:
            return json.loads(self.record.read_text(encoding="utf-8")).get("made_by") == _MADE_BY
        except (OSError, ValueError, AttributeError):
            return False

    def _strange(self) -> list[str]:
        """Names of what the folder holds and no run writes: nothing of others is removed."""
        paths = [path for value in vars(self).values() for path in (value if isinstance(value, list) else [value])]
        known = {path.name for path in paths if path != self.path}
        return sorted(path.name for path in self.path.iterdir() if path.name not in known)


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def _identity() -> dict[str, Any]:
    return {"made_by": _MADE_BY, "machine": platform.machine(), "versions": versions()}
