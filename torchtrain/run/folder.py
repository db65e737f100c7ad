"""The folder of a run: where its files lie, who may make it, and which models it holds.

A folder holds a run from the moment its record has the name `run.json`. While the folder is made, the record is called
`run.json.partial`. `outputs.json` lists every exported file by size and SHA-256. It is written before an export takes
its name, so an export is either whole and listed, or it does not exist.
"""

import errno
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

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
    name_aside,
    read_json,
    replace_file,
    resolve,
    set_aside,
    sync,
    write_all,
    write_file,
)
from torchtrain.checkpoint.folder import STEP, step_of
from torchtrain.checkpoint.manifest import versions
from torchtrain.config import Config, dump_config
from torchtrain.run.lock import at_work, claim, hold, is_held
from torchtrain.training.events import MetricsFile, last_saved, read_metrics

MODEL = "model"
_MADE_BY = "torchtrain train"
_MOST_BYTES = 1 << 28
_ATTEMPTS, _SECONDS_BETWEEN = 10, 0.5
_EXPORT = re.compile(rf"{MODEL}|exports/{STEP.pattern}")
_REMOVED_EXPORT = re.compile(rf"(?:{_EXPORT.pattern}){re.escape(DELETED)}(?:-\d+)?")


class Outputs(BaseModel):
    """The content of `outputs.json`.

    `models` holds the files of each exported folder, by its path in the run's folder; `writing` is the folder that is
    being exported; `removing` is the name of a folder while it is removed; `finished` is the number of steps of a run
    that has left everything.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    models: dict[str, dict[str, FileEntry]] = {}
    writing: str | None = None
    removing: str | None = None
    finished: int | None = None

    @model_validator(mode="after")
    def _stays_in_the_folder(self) -> Self:
        for folder in [*self.models, *([] if self.writing is None else [self.writing])]:
            if not _EXPORT.fullmatch(folder):
                raise ValueError(f"{folder!r} is not a folder of an export")
        if self.removing is not None and not _REMOVED_EXPORT.fullmatch(self.removing):
            raise ValueError(f"{self.removing!r} is not a folder of an export that is removed")
        for name in (name for files in self.models.values() for name in files):
            if name != Path(name).as_posix() or Path(name).is_absolute() or ".." in Path(name).parts or "\0" in name:
                raise ValueError(f"{name!r} is not the name of a file")
        return self

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; without one, the run has exported nothing.

        Raises:
            UserError: it is damaged.
        """
        if not os.path.lexists(path):
            return cls()
        content = read_json(path, most=_MOST_BYTES)
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(f"{path}: is damaged: {place} {error.errors()[0]['msg']}"[:400]) from None

    def write(self, path: Path, **changes: Any) -> None:
        """Change some fields, here and in the file.

        Raises:
            OSError: the system's reason.
        """
        for name, value in changes.items():
            setattr(self, name, value)
        self.models = dict(sorted(self.models.items()))  # the same models always give the same bytes
        replace_file(path, (self.model_dump_json(indent=1) + "\n").encode())


class RunFolder:
    """The folder of a run. Creating the object touches nothing on the disk.

    Args:
        path: `run.folder`.

    Raises:
        UserError: no folder can have this path, or it leads through a link to nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.written = Path(path)
        self.path = _shorten(resolve("run.folder", path), self.written)
        self.record = self.path / "run.json"
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.timing = self.path / "timing.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.exports = self.path / "exports"
        self.bad_steps = self.path / "bad_steps"
        self.plot = self.path / "loss.png"
        self.model = self.path / MODEL
        self.outputs = self.path / "outputs.json"
        self._making = self.record.with_name(self.record.name + PARTIAL)

    # --- making it ----------------------------------------------------------------------------------------------------

    def check(self, replace: bool, cache: str | Path, sources: Iterable[tuple[str, Path]] = ()) -> None:
        """Refuse a path that cannot take a new run.

        Args:
            replace: whether an existing run may be moved aside.
            cache: `data.cache`, which must lie outside the folder.
            sources: files and folders that the run reads, each with its field's name. They must lie outside, too.

        Raises:
            UserError: the path is a file, a link, or a folder that holds anything but a run that may be replaced and
                that no process works on; it cannot be written; or it holds the cache or a source.
        """
        try:
            self._check_content(replace)
            nearest = next(place for place in (self.path, *self.path.absolute().parents) if os.path.lexists(place))
            # Permissions alone do not say whether a folder can be written: root, read-only disks, /proc.
            os.rmdir(tempfile.mkdtemp(dir=nearest))
        except OSError as error:
            raise self._unwritable(error) from None
        own = os.path.realpath(self.path)
        if resolve("data.cache", cache).is_relative_to(own):
            raise UserError(f"data.cache {str(cache)!r}: lies in run.folder {self.path}; choose a folder outside it")
        for field, path in sources if self.path.is_dir() and any(self.path.iterdir()) else ():
            if Path(os.path.realpath(path)).is_relative_to(own):
                raise UserError(f"{field}: {path} lies in run.folder {self.path}; move it elsewhere, or choose another")

    def _check_content(self, replace: bool) -> None:
        if self.path == self.path.parent:
            raise UserError(f"run.folder {self.path}: is the root of all folders; choose one in it")
        if expand(self.written).is_symlink():
            raise UserError(f"run.folder {self.written}: is a link; choose another, or write the folder itself")
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"run.folder {self.path}: exists and is not a folder; choose another")
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if self._is_run():
            if not replace:
                raise UserError(f"run.folder {self.path}: already holds a run; choose another, or --replace it")
            if is_held(self.record):
                raise UserError(at_work(self.record))
        elif self._making.name in names and names <= {self._making.name, self.config.name}:  # its making was cut short
            if self._making.is_file() and is_held(self._making):
                raise UserError(at_work(self._making))
        elif names:
            raise UserError(f"run.folder {self.path}: holds files and is not recognised as a run; choose another")

    @contextmanager
    def create(
        self, config: Config, record: dict[str, Any], replace: bool, sources: Iterable[tuple[str, Path]] = ()
    ) -> Iterator[Path | None]:
        """Make the folder with its record and resolved config, and lock the run until the block ends.

        With `replace` an existing run is first renamed to FOLDER.replaced-N. Nothing is removed.

        Yields:
            The folder to which the existing run was moved; None if there was none.

        Raises:
            UserError: as `check`; the folder cannot be made; or another process works on the run.
        """
        self.check(replace, config.data.cache, sources)
        content = {"made_by": _MADE_BY, "machine": platform.machine(), "versions": versions()}
        content |= {"config": config.model_dump(mode="json")} | record
        with ExitStack() as held:
            try:
                replaced = self._move_aside() if self._is_run() else None
                made = not self.path.exists()
                self.path.mkdir(parents=True, exist_ok=True)
                try:
                    handle = held.enter_context(claim(self._making))
                    self._check_still_empty()
                    self.config.unlink(missing_ok=True)
                    write_file(self.config, dump_config(config).encode())
                    write_all(handle, (json.dumps(content, indent=2) + "\n").encode())
                    os.rename(self._making, self.record)
                    sync(self.path)
                    sync(self.path.absolute().parent)
                except BaseException as error:
                    if os.path.lexists(self._making):
                        self.config.unlink(missing_ok=True)
                    held.__exit__(type(error), error, None)
                    if made:
                        with suppress(OSError):
                            self.path.rmdir()
                    raise
            except OSError as error:
                raise self._unwritable(error) from None
            yield replaced

    def _check_still_empty(self) -> None:
        """Refuse a folder that another process filled since `check`."""
        if self._is_run():
            raise UserError(f"run.folder {self.path}: already holds a run; choose another, or --replace it")
        if {path.name for path in self.path.iterdir()} - {self._making.name, self.config.name}:
            raise UserError(f"run.folder {self.path}: holds files and is not recognised as a run; choose another")

    def _move_aside(self) -> Path:
        """Rename the folder to FOLDER.replaced-N; return the new path."""
        names = (f"{self.path.absolute().name}.replaced-{number}" for number in range(1, 1 << 30))
        aside = next(path for path in map(self.path.absolute().with_name, names) if not os.path.lexists(path))
        with hold(self.record):
            os.rename(self.path.absolute(), aside)
            sync(aside.parent)
        return aside

    # --- reading it ---------------------------------------------------------------------------------------------------

    def check_run(self) -> dict[str, Any]:
        """Return the record of the run that the folder holds.

        Raises:
            UserError: there is none, or it is damaged.
        """
        none = f"{self.path}: holds no run of ours; give the folder of one (run.folder in its config)"
        try:
            if not self.path.is_dir() or not os.path.lexists(self.record):
                raise UserError(none)
        except OSError as error:
            raise UserError(disk_fault(error)) from None
        content = read_json(self.record, most=_MOST_BYTES)
        if content.get("made_by") != _MADE_BY:
            raise UserError(none)
        config, identity = content.get("config"), content.get("identity")
        train = config.get("train") if isinstance(config, dict) else None
        steps = train.get("steps") if isinstance(train, dict) else None
        if type(steps) is not int or not 0 < steps < 2**63 or not isinstance(identity, dict):
            raise UserError(f"{self.record}: is damaged: it lacks the config or the identity of its run; put it back")
        return content

    def note_start(self, step: int, tokens: Path, sha256: str, base: Path | None) -> None:
        """Write into `timing.jsonl` at which step the run starts, and where its tokens and frozen weights are now.

        Args:
            step: steps done.
            tokens: folder of the token store.
            sha256: the digest of its tokens.
            base: folder of the weights beside which adapters are trained; None: every weight is trained.
        """
        place = {"tokens": str(tokens.resolve()), "tokens_sha256": sha256}
        with MetricsFile(self.timing) as timing:
            timing.write("begin", {"step": step, **place, "base": None if base is None else str(base)})

    def last_start(self) -> dict[str, Any] | None:
        """Return what `note_start` wrote last; None if the run was never started.

        Raises:
            UserError: `timing.jsonl` is damaged.
        """
        starts = [event for event in read_metrics(self.timing) if event["event"] == "begin"]
        return starts[-1] if starts else None

    def last_saved(self) -> int | None:
        """Return the last step that was saved, by `timing.jsonl`; None if there was none.

        Raises:
            UserError: the file is damaged.
        """
        return last_saved(read_metrics(self.timing))

    def check_shared(self, record: FileEntry) -> None:
        """Check that this rank sees the same run as rank 0.

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
                time.sleep(_SECONDS_BETWEEN)  # a network disk may show a new folder late
        raise UserError(
            f"run.folder {self.path}: the run is not to be seen on {platform.node()}; run.folder must be on a disk "
            "that all nodes share"
        )

    @property
    def finished(self) -> bool:
        """Whether the run has left everything and its model exists. Only the sizes of the model's files are checked.

        Raises:
            UserError: `outputs.json` is damaged.
            OSError: the system's reason.
        """
        outputs = Outputs.read(self.outputs)
        if outputs.finished is None or not self.model.is_dir():
            return False
        return find_change(self.model, outputs.models.get(MODEL, {}), whole=False) is None

    def listed_models(self) -> dict[str, dict[str, FileEntry]]:
        """Return the files of each exported folder, by its path in the run's folder.

        Raises:
            UserError: `outputs.json` is damaged, or lists no model although there is one.
        """
        models = Outputs.read(self.outputs).models
        if not models and os.path.lexists(self.model):
            raise UserError(f"{self.outputs}: lists no model, and {self.model} exists")
        return models

    def last_models(self, last: int) -> list[tuple[str, int | None, Path]]:
        """Return name, step (None: not known) and folder of the last exported models; the trained one comes last.

        Raises:
            UserError: the run has exported none yet, or `outputs.json` is damaged.
        """
        models: list[tuple[str, int | None, Path]] = [
            (path.name, step_of(path.name), path) for path in self.exports_of_steps()
        ]
        if self.model.is_dir():
            steps = Outputs.read(self.outputs).finished
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
        """Whether an export of this run exists and is whole. A damaged one that holds nothing else is removed.

        Raises:
            UserError: something else has its name.
            OSError: the system's reason.
        """
        if not os.path.lexists(target):
            return False
        fault: str | None = f"{target}: is not a folder"
        if target.is_dir() and not target.is_symlink():
            if not any(target.iterdir()):
                target.rmdir()
                return False
            files = Outputs.read(self.outputs).models.get(self._name(target))
            if files is None:
                fault = f"{target}: was not exported by this run"
            elif (fault := find_change(target, files, whole=True)) is None:
                return True
            elif _find_foreign(target, files) is None:
                self._discard(target)
                return False
        raise UserError(f"{fault}; move {target} elsewhere, then: torchtrain resume {self.path}")

    def begin_export(self, target: Path) -> Path:
        """Return a new folder for the files of an export.

        Raises:
            OSError: the system's reason, such as that the name is taken.
        """
        partial = target.with_name(target.name + PARTIAL)
        if os.path.lexists(partial):
            raise FileExistsError(errno.EEXIST, "it is not this run's; move it elsewhere", str(partial))
        target.parent.mkdir(exist_ok=True)
        Outputs.read(self.outputs).write(self.outputs, writing=self._name(target))
        partial.mkdir()
        return partial

    def end_export(self, partial: Path, target: Path) -> None:
        """List the files of an export, then give the folder its name."""
        files, outputs = entries_of(partial), Outputs.read(self.outputs)
        outputs.write(self.outputs, models=outputs.models | {self._name(target): files})
        commit(partial, target)
        outputs.write(self.outputs, writing=None)

    def drop_export(self) -> None:
        """Remove an export that was not ended."""
        outputs = Outputs.read(self.outputs)
        if outputs.writing is not None:
            shutil.rmtree(self.path / (outputs.writing + PARTIAL), ignore_errors=True)
            outputs.write(self.outputs, writing=None)

    def finish(self, steps: int) -> None:
        """Note that the run has left everything."""
        Outputs.read(self.outputs).write(self.outputs, writing=None, finished=steps)

    def check_model(self) -> None:
        """Check every byte of the trained model of a finished run.

        Raises:
            UserError: a file is not what was exported: names it.
        """
        files = Outputs.read(self.outputs).models.get(MODEL)
        if files is not None and (fault := find_change(self.model, files, whole=True)) is not None:
            raise UserError(f"{fault}; move {self.model} elsewhere, then: torchtrain resume {self.path}")

    # --- going back to an earlier step --------------------------------------------------------------------------------

    def check_later_exports(self, step: int, last: int) -> None:
        """Check that the models of later steps hold nothing but what the run exported.

        Args:
            step: steps done.
            last: steps of the whole run, which is the trained model's.

        Raises:
            UserError: one holds something else.
        """
        models = Outputs.read(self.outputs).models
        for folder in self._find_later_exports(step, last):
            if (foreign := _find_foreign(folder, models.get(self._name(folder), {}))) is not None:
                raise UserError(
                    f"{foreign}: is not recognised as the run's, and would be removed with the model of a later step; "
                    "move it elsewhere"
                )

    def remove_later_exports(self, step: int, last: int) -> None:
        """Remove the models of later steps, because the run resumes from this one.

        Args:
            step, last: as for `check_later_exports`, which has passed.

        Raises:
            OSError: the system's reason.
        """
        for path in self._find_later_exports(step, last):
            self._discard(path)

    def reopen(self) -> None:
        """Note that the run is no longer finished."""
        outputs = Outputs.read(self.outputs)
        if outputs.finished is not None:
            outputs.write(self.outputs, finished=None)
        self.plot.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for the process that holds the run's lock.

        Raises:
            OSError: the system's reason.
        """
        self.drop_export()
        for path in (self.plot, self.outputs):
            path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
        outputs = Outputs.read(self.outputs)
        if outputs.removing is not None:
            shutil.rmtree(self.path / outputs.removing, ignore_errors=True)
            outputs.write(self.outputs, removing=None)

    def _find_later_exports(self, step: int, last: int) -> list[Path]:
        later = [path for path in self.exports_of_steps() if step_of(path.name) > step]
        return later + ([self.model] if step < last and os.path.lexists(self.model) else [])

    def _discard(self, folder: Path) -> None:
        """Remove an export. It is renamed first, so an interruption never leaves a part of it under its name."""
        outputs, name, aside = Outputs.read(self.outputs), self._name(folder), name_aside(folder)
        outputs.write(self.outputs, removing=self._name(aside))
        set_aside(folder, aside)
        shutil.rmtree(aside)
        models = {of: files for of, files in outputs.models.items() if of != name}
        outputs.write(self.outputs, models=models, removing=None)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _unwritable(self, error: OSError) -> UserError:
        reason = one_line(error.strerror or error)
        return UserError(f"run.folder {self.path}: {reason}; choose a folder that can be written")

    def _is_run(self) -> bool:
        """Whether our record lies in the folder, whatever else does, such as a scheduler's log."""
        if not os.path.lexists(self.record):
            return False
        try:
            return read_json(self.record, most=_MOST_BYTES).get("made_by") == _MADE_BY
        except UserError:
            return False


def find_change(folder: Path, files: Mapping[str, FileEntry], whole: bool) -> str | None:
    """Return how an exported folder differs from what was exported, or None. Files that are not listed do not count.

    Args:
        folder: the export.
        files: what it must hold.
        whole: read the content of its files, not only their sizes.

    Raises:
        OSError: a file cannot be read.
    """
    for name, entry in sorted(files.items()):
        if (fault := differs(folder / name, entry, whole)) is not None:
            return f"{folder / name}: {fault}"
    return None if files else f"{folder}: is empty"


def _find_foreign(folder: Path, files: Mapping[str, FileEntry]) -> Path | None:
    """Return a file in an exported folder that the run did not write as it is, or None."""
    if folder.is_symlink() or not folder.is_dir():
        return folder
    for place, folders, names in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *names)):
            entry = files.get(path.relative_to(folder).as_posix())
            if path.is_symlink() or (not path.is_dir() and (entry is None or differs(path, entry) is not None)):
                return path
    return None


def _shorten(path: Path, written: Path) -> Path:
    """Return a path relative to the working directory if the user wrote it so and it lies below."""
    here = Path(os.path.realpath(Path.cwd()))
    return path.relative_to(here) if not expand(written).is_absolute() and here in path.parents else path
