"""The run's folder: refused if it holds anything, made when everything is checked, emptied of a run's own only.

A run is there from when its record has its name, `run.json`. Before, it is `run.json.partial`; while `--replace`
removes the run, `run.json.deleted`. So whenever a process is killed, the folder says what it holds, and who comes next
goes on from there.
"""

import errno
import itertools
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

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
    remove,
    resolve,
    set_aside,
    sync,
    write_all,
    write_file,
)
from torchtrain.checkpoint.folder import STEP, step_of
from torchtrain.checkpoint.manifest import versions
from torchtrain.config import Config, SaveConfig, dump_config
from torchtrain.config_history import restore_meaning
from torchtrain.run.inventory import MODEL_FOLDER, TRANSFORMERS, Inventory, find_change
from torchtrain.run.lock import at_work, claim, hold, is_held
from torchtrain.run.outputs import MODEL, Outputs
from torchtrain.training.events import last_saved, read_metrics

_MADE_BY = "torchtrain train"
# Of the record. 1, which stands nowhere, had no `outputs.json`: such a run is finished when its plot is there.
_FORMAT = 2
_MOST_BYTES = 1 << 28
_ATTEMPTS, _SECONDS_BETWEEN = 10, 0.5


class RunFolder:
    """Paths of a run. Making the object touches nothing.

    Args:
        path: `run.folder`.

    Raises:
        UserError: no folder can have this path, or it leads through a link to nothing.
    """

    def __init__(self, path: str | Path) -> None:
        self.written = Path(path)
        self.path = _shorten(resolve("run.folder", path), self.written)
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
        self.model = self.path / MODEL
        self.outputs = self.path / "outputs.json"
        self._making = self.record.with_name(self.record.name + PARTIAL)
        self._removing = self.record.with_name(self.record.name + DELETED)
        self._inventory = Inventory(self.path)

    def check(self, replace: bool, cache: str | Path, sources: Iterable[tuple[str, Path]] = ()) -> None:
        """Refuse a place that cannot take a run.

        Args:
            replace: whether a run that stands there may be removed.
            cache: `data.cache`, which must stand elsewhere: a run finds its folder empty, and is removed with it.
            sources: what the run is made of, with the field that names it: it must stand elsewhere, too.

        Raises:
            UserError: it is a file, or a folder that holds something: a run without `replace`, one that a process is at
                work in or that holds files of others, or anything else. Or it cannot be written, or holds the cache or
                a source.
        """
        try:
            self._check_content(replace)
            self._check_writable()
        except OSError as error:
            raise self._unwritable(error) from None
        own = os.path.realpath(self.path)
        if resolve("data.cache", cache).is_relative_to(own):
            raise UserError(f"data.cache {str(cache)!r}: stands in run.folder {self.path}; choose a folder outside it")
        for field, path in sources if self.path.is_dir() and any(self.path.iterdir()) else ():
            if Path(os.path.realpath(path)).is_relative_to(own):
                raise UserError(
                    f"{field}: {path} stands in run.folder {self.path}; move it elsewhere, or choose another"
                )

    def _check_writable(self) -> None:
        """Make something where ours will stand: permissions alone do not tell (root, read-only disks, /proc)."""
        nearest = next(place for place in (self.path, *self.path.absolute().parents) if os.path.lexists(place))
        os.rmdir(tempfile.mkdtemp(dir=nearest))

    def _check_content(self, replace: bool, ours: bool = False) -> None:
        """Check what the folder holds; `ours`: this process holds the run."""
        if self.path == self.path.parent:
            raise UserError(f"run.folder {self.path}: is the root of all folders; choose one in it")
        if expand(self.written).is_symlink() or (self.path.exists() and not self.path.is_dir()):
            what = (
                f"{self.written}: is a link"
                if expand(self.written).is_symlink()
                else f"{self.path}: exists and is not a folder"
            )
            raise UserError(f"run.folder {what}; choose another, or write the folder itself")
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if self.record.exists() and not replace and self._is_run(self.record):
            raise UserError(f"run.folder {self.path}: already holds a run; choose another, or --replace it")
        # What an interruption left as it was made or removed may go without `replace`.
        holder = next((path for path in (self.record, self._removing, self._making) if os.path.lexists(path)), None)
        if holder is None or not (holder == self._making or self._is_run(holder)):
            raise UserError(f"run.folder {self.path}: holds files and is not recognised as a run; choose another")
        if not ours and holder.is_file() and is_held(holder):
            raise UserError(at_work(holder))
        _, strange = self._take_inventory(None if holder == self._making else holder)
        self._refuse_strange(strange)

    def _refuse_strange(self, strange: list[str]) -> None:
        if strange:
            raise UserError(
                f"run.folder {self.path}: holds {one_line(strange[0])}, which is not recognised as the run's; "
                "move it elsewhere before the run is replaced"
            )

    @contextmanager
    def create(
        self, config: Config, record: dict[str, Any], replace: bool, sources: Iterable[tuple[str, Path]] = ()
    ) -> Iterator[None]:
        """Make the folder with its record and resolved config, and hold the run for as long as the block lasts.

        A run that is to be replaced goes first, everything checked once more; nothing goes that is not its own.

        Raises:
            UserError: as `check`; the folder cannot be made; or a process is at work in the run that is there.
        """
        self.check(replace, config.data.cache, sources)
        content = {"made_by": _MADE_BY, "format": _FORMAT, "machine": platform.machine(), "versions": versions()}
        content |= {"config": config.model_dump(mode="json")} | record
        made = not self.path.exists()
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                handle = held.enter_context(claim(self._making))
                with hold(self.record) if self.record.exists() else nullcontext():
                    self._check_content(replace, ours=True)
                    if self.record.exists():
                        os.replace(self.record, self._removing)
                        sync(self.path)
                    self._remove_rest()
                write_file(self.config, dump_config(config).encode())
                try:
                    write_all(handle, (json.dumps(content, indent=2) + "\n").encode())
                    os.rename(self._making, self.record)
                except BaseException:
                    if os.path.lexists(self._making):
                        self.config.unlink(missing_ok=True)
                    raise
                sync(self.path)
                sync(self.path.absolute().parent)
            except BaseException as error:
                held.__exit__(type(error), error, None)
                if made:
                    with suppress(OSError):
                        self.path.rmdir()
                if isinstance(error, OSError):
                    raise self._unwritable(error) from None
                raise
            yield

    def _remove_rest(self) -> None:
        """Remove all that is a run's own of what is there but what is being made, the record last."""
        own, strange = self._take_inventory(self._removing if os.path.lexists(self._removing) else None)
        self._refuse_strange(strange)  # what came since it was looked at
        last = (self._making.name, self._removing.name, self.outputs.name)  # by these the others are known
        remove(self.path, (name for name in own if name not in last))
        self.outputs.unlink(missing_ok=True)
        self._removing.unlink(missing_ok=True)

    def _take_inventory(self, record: Path | None) -> tuple[list[str], list[str]]:
        """Return the paths of the run's own files, and of all else.

        Of one that was not made yet: what its making leaves.
        """
        if record is None:
            names = sorted(path.name for path in self.path.iterdir())
            own = {self._making.name, self.config.name}
            return [name for name in names if name in own], [name for name in names if name not in own]
        content = _read(record)
        config = content.get("config")
        log = config.get("log") if isinstance(config, dict) else None
        wandb = isinstance(log, dict) and log.get("wandb") is not None
        return self._inventory.take(Outputs.read(self.outputs), listed=_is_listed(content), wandb=wandb)

    def check_run(self) -> dict[str, Any]:
        """Return the record of the run that stands here.

        Raises:
            UserError: there is none, or it is damaged.
        """
        none = f"{self.path}: holds no run of ours; give the folder of one (run.folder in its config)"
        try:
            if not self.path.is_dir() or not os.path.lexists(self.record):
                if os.path.lexists(self._removing):
                    none = f"{self.path}: holds what is left of a run that --replace was removing; train anew"
                raise UserError(none)
        except OSError as error:
            raise UserError(disk_fault(error)) from None
        content = _read(self.record)
        if content.get("made_by") != _MADE_BY:
            raise UserError(none)
        config, identity = content.get("config"), content.get("identity")
        train = config.get("train") if isinstance(config, dict) else None
        steps = train.get("steps") if isinstance(train, dict) else None
        if type(steps) is not int or not 0 < steps < 2**63 or not isinstance(identity, dict):
            raise UserError(f"{self.record}: is damaged: it lacks the config or the identity of its run; put it back")
        return content

    def last_saved(self) -> int | None:
        """Return the last step that was saved, by `timing.jsonl`; without it, one that must have been, by
        `metrics.jsonl` and the config; None if there was none.

        Raises:
            UserError: one of the files is damaged.
        """
        if self.timing.exists():
            return last_saved(read_metrics(self.timing))
        config = self.check_run()["config"]
        done = max((event["step"] for event in read_metrics(self.metrics) if event["event"] == "step"), default=0)
        try:
            save = SaveConfig.model_validate(restore_meaning(config).get("save", {}))
        except ValidationError:
            raise UserError(f"{self.record}: is damaged: it lacks the config of its run; put it back") from None
        first = next(itertools.chain(*save.schedule(config["train"]["steps"])), None)
        return first if first is not None and done > first else None

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

    # --- what it exports ----------------------------------------------------------------------------------------------

    def has_export(self, target: Path) -> bool:
        """Whether a folder of this run's export is there. One that is not whole goes, if all in it is the run's own.

        Raises:
            UserError: something else has its name.
            OSError: what the system says.
        """
        if not os.path.lexists(target):
            return False
        outputs, name = Outputs.read(self.outputs), self._name(target)
        fault = f"{target}: is not a folder"
        if target.is_dir() and not target.is_symlink():
            if not any(target.iterdir()):
                target.rmdir()
                return False
            files = outputs.models.get(name)
            if files is None and not _is_listed(_read(self.record)) and is_whole(target):
                return True
            fault = (
                f"{target}: was not exported by this run" if files is None else find_change(target, files, whole=True)
            )
            if fault is None:
                return True
            if files is not None and not self._strange_in([target]):
                self._discard(target)
                return False
        raise UserError(f"{fault}; move {target} elsewhere, then: torchtrain resume {self.path}")

    def begin_export(self, target: Path) -> Path:
        """Return a new folder in which an export is made: it belongs to the run, with all that is written into it.

        Raises:
            OSError: what the system says, such as that something has its name.
        """
        partial = target.with_name(target.name + PARTIAL)
        if os.path.lexists(partial):
            raise FileExistsError(errno.EEXIST, "it is not this run's; move it elsewhere", str(partial))
        target.parent.mkdir(exist_ok=True)
        Outputs.read(self.outputs).write(self.outputs, writing=self._name(target))
        partial.mkdir()
        return partial

    def end_export(self, partial: Path, target: Path) -> None:
        """Write down what an export has, then give it its name: it is there whole and listed, or not at all."""
        files, outputs = entries_of(partial), Outputs.read(self.outputs)
        outputs.write(self.outputs, models=outputs.models | {self._name(target): files})
        commit(partial, target)
        outputs.write(self.outputs, writing=None)

    def drop_export(self) -> None:
        """Remove what was exported so far and has no name yet."""
        outputs = Outputs.read(self.outputs)
        if outputs.writing is not None:
            shutil.rmtree(self.path / (outputs.writing + PARTIAL), ignore_errors=True)
            outputs.write(self.outputs, writing=None)

    def finish(self, steps: int) -> None:
        """Write down that the run has left everything."""
        outputs = Outputs.read(self.outputs)
        models = dict(outputs.models)
        if MODEL not in models:  # exported before there was a list
            models[MODEL] = {
                path.name: entry_of(path) for path in sorted(self.model.iterdir()) if TRANSFORMERS.fullmatch(path.name)
            }
        outputs.write(self.outputs, models=models, writing=None, finished=steps)

    @property
    def finished(self) -> bool:
        """Whether the run has left everything, and its model is there: of its files only the sizes are looked at.

        Raises:
            UserError: `outputs.json` or the record is damaged.
            OSError: what the system says.
        """
        outputs = Outputs.read(self.outputs)
        if outputs.finished is not None:
            return self.model.is_dir() and find_change(self.model, outputs.models.get(MODEL, {}), whole=False) is None
        return not _is_listed(_read(self.record)) and self.plot.is_file() and is_whole(self.model)

    def listed_models(self) -> dict[str, dict[str, FileEntry]]:
        """Return the files of each exported folder, by its path in the run's.

        Raises:
            UserError: `outputs.json` is damaged, or gone though a model stands there.
        """
        models = Outputs.read(self.outputs).models
        if not models and os.path.lexists(self.model) and _is_listed(_read(self.record)):
            raise UserError(f"{self.outputs}: lists no model, and {self.model} is there")
        return models

    def check_model(self) -> None:
        """Check every byte of the trained model of a run that is finished.

        Raises:
            UserError: a file is not what was exported: names it.
        """
        files = Outputs.read(self.outputs).models.get(MODEL)
        if files is not None and (fault := find_change(self.model, files, whole=True)) is not None:
            raise UserError(f"{fault}; move {self.model} elsewhere, then: torchtrain resume {self.path}")

    def check_forgetting(self, step: int, last: int) -> None:
        """Check that the models of later steps are the run's own, and nothing else lies in them.

        Args:
            step: steps done.
            last: steps of the whole run; the trained model is of these.

        Raises:
            UserError: one holds something else.
        """
        if strange := self._strange_in(self._find_exports_after(step, last)):
            raise UserError(
                f"{self.path / strange[0]}: is not recognised as the run's, and would go with the model of a later "
                "step; move it elsewhere"
            )

    def forget_after(self, step: int, last: int) -> None:
        """Remove the models of later steps: the run is taken up at this one, and theirs is another future.

        Args:
            step, last: as for `check_forgetting`, which has passed.

        Raises:
            OSError: what the system says.
        """
        for path in self._find_exports_after(step, last):
            self._discard(path)

    def reopen(self) -> None:
        """Write down that the run is not finished any more."""
        outputs = Outputs.read(self.outputs)
        if outputs.finished is not None:
            outputs.write(self.outputs, finished=None)
        self.plot.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what interruptions left. Only for who holds the run's lock.

        Raises:
            OSError: what the system says.
        """
        self.drop_export()
        for path in (self.plot, self.outputs):
            path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
        outputs, listed = Outputs.read(self.outputs), _is_listed(_read(self.record))
        for folder in (self.path, self.exports):
            for path in folder.iterdir() if folder.is_dir() else ():
                match = MODEL_FOLDER.fullmatch(self._name(path))
                if match and match[2] and (not listed or self._name(path) == outputs.removing):
                    self._remove(path, outputs.models.get(match[1]), by_name=not listed)
        if outputs.removing is not None:
            outputs.write(self.outputs, removing=None)

    def exports_of_steps(self) -> list[Path]:
        """Return the folders in `exports/` that are named as a step's."""
        return sorted(path for path in self._exports() if path.is_dir())

    def _exports(self) -> list[Path]:
        return [path for path in self.exports.glob("step-*") if STEP.fullmatch(path.name)]

    def _find_exports_after(self, step: int, last: int) -> list[Path]:
        later = [path for path in self._exports() if step_of(path.name) > step]
        return later + ([self.model] if step < last and os.path.lexists(self.model) else [])

    def _strange_in(self, folders: list[Path]) -> list[str]:
        if not folders:
            return []
        names = tuple(self._name(folder) for folder in folders)
        _, strange = self._take_inventory(self.record)
        return [name for name in strange if name in names or name.startswith(tuple(f"{of}/" for of in names))]

    def _discard(self, folder: Path) -> None:
        """Remove an export. It loses its name first, so that a crash never leaves a part of it under that name."""
        outputs, name = Outputs.read(self.outputs), self._name(folder)
        files = outputs.models.get(name)
        aside = name_aside(folder)
        outputs.write(self.outputs, removing=self._name(aside))
        set_aside(folder, aside)
        self._remove(aside, files, by_name=not _is_listed(_read(self.record)))
        models = {of: held for of, held in outputs.models.items() if of != name}
        outputs.write(self.outputs, models=models, removing=None)

    def _remove(self, folder: Path, files: Mapping[str, FileEntry] | None, by_name: bool) -> None:
        """Remove what is the run's of a folder that no longer counts: what is listed and is what it was; else, of a run
        without a list, what transformers writes.
        """
        if folder.is_symlink() or not folder.is_dir():
            return
        if files is not None:
            remove(folder, [name for name, entry in files.items() if differs(folder / name, entry) is None])
        elif by_name:
            remove(folder, filter(TRANSFORMERS.fullmatch, os.listdir(folder)))

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    def _unwritable(self, error: OSError) -> UserError:
        said = one_line(error.strerror or error)
        return UserError(f"run.folder {self.path}: {said}; choose a folder that can be written")

    def _is_run(self, record: Path) -> bool:
        """A run has our record; what else lies there, such as a scheduler's log, does not matter to it."""
        try:
            return _read(record).get("made_by") == _MADE_BY
        except UserError:
            return False


def is_whole(model: Path) -> bool:
    """Whether an exported folder that stands in no list has a config and weights, and none is cut off."""
    from safetensors import SafetensorError, safe_open

    weights = sorted(model.glob("*.safetensors"))
    try:
        for path in weights:
            with safe_open(path, framework="np"):
                pass
        index = model / "model.safetensors.index.json"
        named = set(read_json(index, most=_MOST_BYTES)["weight_map"].values()) if index.exists() else set()
    except (OSError, UserError, SafetensorError, LookupError, AttributeError, TypeError):
        return False
    return bool(weights) and (model / "config.json").is_file() and named <= {path.name for path in weights}


def _shorten(path: Path, written: Path) -> Path:
    """Return a path as people write it: from here, where they gave it so and it lies below."""
    here = Path(os.path.realpath(Path.cwd()))
    return path.relative_to(here) if not expand(written).is_absolute() and here in path.parents else path


def _read(record: Path) -> dict[str, Any]:
    return read_json(record, most=_MOST_BYTES)


def _is_listed(record: dict[str, Any]) -> bool:
    return record.get("format", 1) != 1
