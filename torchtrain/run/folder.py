"""The folder of a run: its files, who may make it, and which models it holds. It holds a run once it has `run.json`.
`outputs.json` lists every exported file by size and SHA-256 before an export gets its name.
"""

import glob
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from anchorline.errors import UserError, disk_fault, one_line
from anchorline.files import (
    DELETED,
    PARTIAL,
    FileEntry,
    commit,
    differs,
    entries_of,
    entry_of,
    expand,
    read_json,
    remove_tree,
    replace_file,
    resolve,
    set_aside,
    sync,
    write_file,
)
from torchtrain.checkpoint.folder import STEP, step_of
from torchtrain.checkpoint.identity import is_free
from torchtrain.config import Config, DataConfig, dump_config, load_config
from torchtrain.run.lock import at_work, hold, is_held
from torchtrain.run.record import MADE_BY, RunRecord
from torchtrain.training.events import MetricsFile, last_saved, read_metrics

MODEL = "model"
_MOST_BYTES = 1 << 28
_ATTEMPTS, _SECONDS_BETWEEN = 10, 0.5


class Outputs(BaseModel):
    """What the run has exported: files by folder, and the steps of a run that is finished (`outputs.json`)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    models: dict[str, dict[str, FileEntry]] = {}
    finished: int | None = None


class RunFolder:
    """The folder of a run; creating the object touches no disk. Raises UserError: no folder can have this path."""

    def __init__(self, path: str | Path) -> None:
        self.written = Path(path)
        self.path = _shorten(resolve("run.folder", path), self.written)
        self.record = self.path / "run.json"
        self.lock = self.path / ".lock"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.timing = self.path / "timing.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.exports = self.path / "exports"
        self.bad_steps = self.path / "bad_steps"
        self.plot = self.path / "loss.png"
        self.model = self.path / MODEL
        self.outputs = self.path / "outputs.json"

    # --- making it ----------------------------------------------------------------------------------------------------

    def check(self, replace: bool, source: str, data: DataConfig) -> None:
        """Refuse a path that cannot take a new run.

        replace: whether an existing run may be renamed.
        source, data: `model.source`, cache, prepared store and sources must not be in the folder.
        Raises UserError: the path is a file, a link, or a folder that holds anything but a run that may be replaced and
            that no process works on; it cannot be written; or the new run reads from it.
        """
        try:
            self._check_content(replace)
            nearest = next(place for place in (self.path, *self.path.absolute().parents) if os.path.lexists(place))
            # Permissions alone do not say whether a folder can be written: root, read-only disks, /proc.
            os.rmdir(tempfile.mkdtemp(dir=nearest))
        except OSError as error:
            raise self._unwritable(error) from None
        resolve("data.cache", data.cache)
        own = os.path.realpath(self.path)
        for field, place in _places_read(source, data):
            if "\0" not in place and Path(os.path.realpath(expand(place))).is_relative_to(own):
                raise UserError(f"{field}: {place} lies in run.folder {self.path}; choose a folder outside it")

    def _check_content(self, replace: bool, held: bool = False) -> None:
        """Refuse a folder that holds something else, or that another process works on unless this one has `held` it."""
        if self.path == self.path.parent:
            raise UserError(f"run.folder {self.path}: is the root of all folders; choose one in it")
        if expand(self.written).is_symlink():
            raise UserError(f"run.folder {self.written}: is a link; choose another, or write the folder itself")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"run.folder {self.path}: exists and is not a folder; choose another")
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        begun = {self.lock.name, self.config.name, self.record.name + PARTIAL}  # of a process killed while it made it
        if self.is_run():
            if not replace:
                raise UserError(
                    f"run.folder {self.path}: already holds a run; go on with it by --resume, or by: torchtrain resume "
                    f"{self.path}; or choose another, or --replace it"
                )
        elif names and not (self.lock.name in names and names <= begun):
            raise UserError(f"run.folder {self.path}: holds files and is not recognised as a run; choose another")
        if not held and is_held(self.lock):
            raise UserError(at_work(self.path))

    @contextmanager
    def create(self, config: Config, record: RunRecord, replace: bool) -> Iterator[Path | None]:
        """Make the folder with its record and resolved config, and lock the run until the block ends.

        With `replace` an existing run is first renamed to FOLDER.replaced-N; yield that folder, or None. Nothing is
        removed.
        Raises UserError: as `check`; the folder cannot be made; or another process works on the run.
        """
        self.check(replace, config.model.source, config.data)
        content = json.dumps(record.model_dump(mode="json"), indent=2) + "\n"
        try:
            replaced = self._move_aside() if self.is_run() else None
            made = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._unwritable(error) from None
        with hold(self.lock):
            self._check_content(replace=False, held=True)
            try:
                self.config.unlink(missing_ok=True)
                write_file(self.config, dump_config(config).encode())
                replace_file(self.record, content.encode())
                sync(self.path.absolute().parent)
            except BaseException as error:
                for path in (self.record, self.record.with_name(self.record.name + PARTIAL), self.config, self.lock):
                    path.unlink(missing_ok=True)
                if made:
                    with suppress(OSError):
                        self.path.rmdir()
                if isinstance(error, OSError):
                    raise self._unwritable(error) from None
                raise
            yield replaced

    def _move_aside(self) -> Path:
        names = (f"{self.path.absolute().name}.replaced-{number}" for number in range(1, 1 << 30))
        aside = next(path for path in map(self.path.absolute().with_name, names) if not os.path.lexists(path))
        with hold(self.lock):
            os.rename(self.path.absolute(), aside)
            sync(aside.parent)
        return aside

    # --- reading it ---------------------------------------------------------------------------------------------------

    def check_run(self) -> RunRecord:
        """Return the record of the run that the folder holds. Raises UserError: there is none, or it is damaged."""
        try:
            content = read_json(self.record, most=_MOST_BYTES) if os.path.lexists(self.record) else {}
        except OSError as error:
            raise UserError(disk_fault(error)) from None
        if content.get("made_by") != MADE_BY:
            raise UserError(f"{self.path}: holds no run; give the folder of one (run.folder in its config)")
        try:
            return RunRecord.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = one_line(".".join(map(str, first["loc"])))
            raise UserError(
                f"{self.record}: is damaged, or of another version of torchtrain: {place}: {first['msg']}; put it "
                "back, or take the version that began the run"
            ) from None

    def read_config(self, overrides: Sequence[str] = ()) -> Config:
        """Return the run's own config, with overrides. Raises UserError: it is damaged, or an override does not fit."""
        try:
            load_config(self.config)
        except UserError as error:
            raise UserError(
                f"{error}; the config with which the run began stands in {self.record} and in manifest.json of each "
                "checkpoint, too, under config: correct config.yaml by that"
            ) from None
        return load_config(self.config, overrides)

    def check_places(self, source: str, data: DataConfig) -> None:
        """Refuse a relative path that is not here but where the run began. Raises UserError: names that folder."""
        began = self.check_run().began_in
        for field, place in _places_read(source, data):
            if field != "data.cache" and not _is_there("", place) and _is_there(began, place):
                other = f", or give {field}={Path(began, place)}" if is_free(field) else ""
                raise UserError(
                    f"{field}: {place} is not in {Path.cwd()}; the run began in {began}: resume it from there{other}"
                )

    def note_start(self, step: int, tokens: Path, sha256: str, base: Path) -> None:
        """Write into `timing.jsonl` at which step the run starts, and where its tokens and first weights are now."""
        place = {"tokens": str(tokens.resolve()), "tokens_sha256": sha256}
        with MetricsFile(self.timing) as timing:
            timing.write("begin", {"step": step, **place, "base": str(base.resolve())})

    def last_saved(self) -> int | None:
        """Return the last saved step of `timing.jsonl`; None if there was none. Raises UserError: it is damaged."""
        return last_saved(read_metrics(self.timing))

    def check_shared(self, record: FileEntry) -> None:
        """Refuse a `run.json` here that is not `record`, as rank 0 sees it."""
        for attempt in range(_ATTEMPTS):
            with suppress(OSError):
                if entry_of(self.record) == record:
                    return
            if attempt + 1 < _ATTEMPTS:
                time.sleep(_SECONDS_BETWEEN)  # a network disk may show a new folder late
        raise UserError(
            f"run.folder {self.path}: {platform.node()} does not see the run; run.folder must be on a disk that all "
            "nodes share"
        )

    @property
    def finished(self) -> bool:
        """Whether the run is finished and its model there, by size. Raises UserError: damage. Raises OSError."""
        outputs = self._read_outputs()
        return outputs.finished is not None and find_change(self.model, outputs.models.get(MODEL, {}), False) is None

    def listed_models(self) -> dict[str, dict[str, FileEntry]]:
        """Return the files of each exported folder, by its path in the run's folder. Raises UserError: `outputs.json`
        is damaged, or lists no model although there is one.
        """
        models = self._read_outputs().models
        if not models and os.path.lexists(self.model):
            raise UserError(f"{self.outputs}: lists no model, and {self.model} exists")
        return models

    def last_models(self, last: int) -> list[tuple[str, int | None, Path]]:
        """Return (name, step or None, folder) of the last exports, the trained model's last. Raises UserError: none."""
        models: list[tuple[str, int | None, Path]] = [
            (path.name, step_of(path.name), path) for path in self.exports_of_steps()
        ]
        if self.model.is_dir():
            steps = self._read_outputs().finished
            models = [model for model in models if model[1] != steps]  # the same weights
            models.append((MODEL, steps, self.model))
        if not models:
            raise UserError(f"{self.path}: has exported no model yet; `torchtrain status` shows its progress")
        return models[-last:]

    def exports_of_steps(self) -> list[Path]:
        """Return the folders in `exports/` that are named after a step."""
        return sorted(path for path in self.exports.glob("step-*") if STEP.fullmatch(path.name) and path.is_dir())

    # --- exporting into it --------------------------------------------------------------------------------------------

    def has_export(self, target: Path) -> bool:
        """Whether this export is there, every byte checked. Raises UserError: it has changed. Raises OSError."""
        if not os.path.lexists(target):
            return False
        files = self._read_outputs().models.get(self._name(target))
        fault = f"{target}: was not exported by this run" if files is None else find_change(target, files, whole=True)
        if fault is not None:
            raise UserError(f"{fault}; move {target} elsewhere, then: torchtrain resume {self.path}")
        return True

    @contextmanager
    def new_export(self, target: Path) -> Iterator[Path]:
        """Yield a new folder for an export. When the block ends its files are listed and it gets its name."""
        partial = target.with_name(target.name + PARTIAL)
        remove_tree(partial)
        try:
            partial.mkdir(parents=True)
            yield partial
            outputs = self._read_outputs()
            self._write_outputs(outputs, models=outputs.models | {self._name(target): entries_of(partial)})
            commit(partial, target)
        except BaseException:
            with suppress(OSError):
                remove_tree(partial)
            raise

    def finish(self, steps: int, plot: bytes) -> None:
        """Write `loss.png`, and note that the run is finished."""
        replace_file(self.plot, plot)
        self._write_outputs(self._read_outputs(), finished=steps)

    # --- going back to an earlier step --------------------------------------------------------------------------------

    def check_later_exports(self, step: int, last: int) -> None:
        """Refuse models after `step`, the trained one (`last`) too, with files that the run did not export."""
        models = self._read_outputs().models
        for folder in self._later_exports(step, last):
            listed = models.get(self._name(folder), {})
            for path in [folder] if folder.is_symlink() or not folder.is_dir() else folder.rglob("*"):
                if path.is_symlink() or (not path.is_dir() and path.relative_to(folder).as_posix() not in listed):
                    raise UserError(
                        f"{path}: was not written by the run, and would be removed with the model of a later step; "
                        "move it elsewhere"
                    )

    def remove_later_exports(self, step: int, last: int) -> None:
        """Remove these models, which `check_later_exports` has passed: the run resumes from here. Raises OSError."""
        outputs = self._read_outputs()
        for folder in self._later_exports(step, last):
            aside = set_aside(folder)  # first, so that an interruption never leaves a part of it under its name
            models = {name: files for name, files in outputs.models.items() if name != self._name(folder)}
            self._write_outputs(outputs, models=models)
            remove_tree(aside)
        if outputs.finished is not None:
            self._write_outputs(outputs, finished=None)
        self.plot.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for the process that holds the run's lock."""
        for path in (self.plot, self.outputs):
            path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
        for pattern in (MODEL, f"{self.exports.name}/step-*"):
            for left in (*self.path.glob(pattern + PARTIAL), *self.path.glob(f"{pattern}{DELETED}*")):
                remove_tree(left)

    def _later_exports(self, step: int, last: int) -> list[Path]:
        later = [path for path in self.exports_of_steps() if step_of(path.name) > step]
        return later + ([self.model] if step < last and os.path.lexists(self.model) else [])

    def _read_outputs(self) -> Outputs:
        if not os.path.lexists(self.outputs):
            return Outputs()
        try:
            return Outputs.model_validate(read_json(self.outputs, most=_MOST_BYTES))
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(f"{self.outputs}: is damaged: {place} {error.errors()[0]['msg']}"[:400]) from None

    def _write_outputs(self, outputs: Outputs, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(outputs, name, value)
        outputs.models = dict(sorted(outputs.models.items()))  # the same models always give the same bytes
        replace_file(self.outputs, (outputs.model_dump_json(indent=1) + "\n").encode())

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _unwritable(self, error: OSError) -> UserError:
        reason = one_line(error.strerror or error)
        return UserError(f"run.folder {self.path}: {reason}; choose a folder that can be written")

    def is_run(self) -> bool:
        """Whether the folder has a run's record, with whatever else, such as a scheduler's log."""
        try:
            return os.path.lexists(self.record) and read_json(self.record, most=_MOST_BYTES).get("made_by") == MADE_BY
        except UserError:
            return False


def find_change(folder: Path, files: Mapping[str, FileEntry], whole: bool) -> str | None:
    """Return how an exported folder differs from `files` (in content if `whole`), or None. Raises OSError."""
    for name, entry in sorted(files.items()):
        if (fault := differs(folder / name, entry, whole)) is not None:
            return f"{folder / name}: {fault}"
    return None if files else f"{folder}: is empty"


def _places_read(source: str, data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield each path that a run reads, with the field that names it. A pattern counts as a path."""
    named = {"model.source": source, "data.cache": data.cache, "data.prepared": data.prepared}
    for number, one in enumerate(data.sources):
        named |= {f"data.sources.{number}.{kind}": getattr(one, kind) for kind in ("files", "texts", "dataset")}
    yield from ((field, place) for field, place in named.items() if place is not None)


def _is_there(folder: str, place: str) -> bool:
    found = [place, *glob.iglob(place, root_dir=folder, recursive=True)]
    return any(os.path.lexists(os.path.join(folder, one)) for one in found)


def _shorten(path: Path, written: Path) -> Path:
    """Return a path relative to the working directory if the user wrote it so and it is below that."""
    here = Path(os.path.realpath(Path.cwd()))
    return path.relative_to(here) if not expand(written).is_absolute() and here in path.parents else path
