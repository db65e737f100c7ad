"""The run's folder: refused if it holds anything, made only when everything is checked, removed only if it is a run."""

import importlib.metadata
import json
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

from torchtrain import __version__
from torchtrain.config import Config, dump_config
from torchtrain.errors import UserError

_MADE_BY = "torchtrain train"


class RunFolder:
    """Paths of a run. Making the object touches nothing.

    Args:
        path: `run.folder`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.record = self.path / "run.json"  # also what a run is recognised by
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.plot = self.path / "loss.png"
        self.model = self.path / "model"
        self.partial_model = self.path / "model.partial"

    def check(self, replace: bool, cache: str | Path) -> None:
        """Refuse a place that cannot take a run.

        Args:
            replace: whether a run that stands there may be removed.
            cache: `data.cache`, which must stand elsewhere: a run finds its folder empty, and is removed with it.

        Raises:
            UserError: it is a file, or a folder that holds something: a run without `replace`, or anything else. Or it
                cannot be written, or holds the cache.
        """
        try:
            self._check_writable()
            self._check_content(replace)
        except OSError as error:
            raise self._unwritable(error) from None
        if Path(os.path.realpath(Path(cache).expanduser())).is_relative_to(os.path.realpath(self.path)):
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

    def create(self, config: Config, record: dict[str, Any], replace: bool) -> None:
        """Make the folder with its record and resolved config, removing a run that is to be replaced.

        Raises:
            UserError: as `check`, or the folder cannot be made.
        """
        self.check(replace, config.data.cache)
        try:
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)
            # The record first: whatever is interrupted from here on is recognised as a run.
            self.record.write_text(json.dumps(_identity() | record, indent=2) + "\n", encoding="utf-8")
            self.config.write_text(dump_config(config), encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"run.folder {self.path}: {error.strerror}; choose a folder that can be written")

    def _is_run(self) -> bool:
        """A run has our record and nothing that we do not write."""
        known = {p.name for p in vars(self).values() if p != self.path}
        if not {p.name for p in self.path.iterdir()} <= known:
            return False
        try:
            return json.loads(self.record.read_text(encoding="utf-8")).get("made_by") == _MADE_BY
        except (OSError, ValueError, AttributeError):
            return False


def _identity() -> dict[str, Any]:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
    return {
        "made_by": _MADE_BY,
        "torchtrain": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": versions,
    }
