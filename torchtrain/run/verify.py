"""`torchtrain verify`: whether every file with a digest is still what was written."""

import os
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import FileEntry, entry_of
from torchtrain.checkpoint.manifest import DamageError, Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.data.store import HEADER, TokenStore
from torchtrain.modeling.load import digest_weights, weight_files
from torchtrain.run.folder import RunFolder, find_change
from torchtrain.run.lock import is_held
from torchtrain.training.events import read_metrics

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """The result of one check: what was checked, whether it is good, and what was read or what is wrong."""

    what: str
    good: bool
    said: str

    def __str__(self) -> str:
        return f"{'good' if self.good else 'BAD':<5}{self.what}: {self.said}"


def verify_folder(folder: Path) -> Iterator[Finding]:
    """Check everything in a folder that has a digest, one thing after another.

    Of a run these are its checkpoints, the beginning of `metrics.jsonl` that belongs to the last of them, its exported
    models, and, wherever they are, the tokens and the first weights with which it was last started.
    Raises UserError: it is neither a run's nor a token store's.
    """
    run = RunFolder(folder)
    if (folder / HEADER).exists():
        yield _check(f"tokens {quoted(folder)}", lambda: _verify_store(folder))
    elif run.record.exists():
        yield from _verify_run(run, run.check_run().identity)
    else:
        raise UserError(
            f"{quoted(folder)}: is neither a run's folder nor a token store's; give one with run.json or {HEADER}"
        )


def _verify_run(run: RunFolder, identity: dict[str, Any]) -> Iterator[Finding]:
    checkpoints = Checkpoints(run.checkpoints)
    yield from _read(run.config.name, run.read_config)  # it has no digest, and resume reads it
    steps = yield from _read("checkpoints", lambda: _steps(run, checkpoints))
    at_work = is_held(run.lock)

    def check(what: str, folder: Path, check: Callable[[], object]) -> Iterator[Finding]:
        """Yield nothing of a folder that a run at work has removed meanwhile, or has not given its name yet."""
        finding = _check(what, check)
        if finding.good or os.path.lexists(folder) or not (at_work or is_held(run.lock)):
            yield finding

    for step in steps or ():
        path = checkpoints.path(step)
        yield from check(f"checkpoint of step {step}", path, partial(_verify_checkpoint, checkpoints, step))
    if steps and (newest := checkpoints.steps()):
        path = checkpoints.path(newest[-1])
        yield from check(run.metrics.name, path, lambda: _verify_metrics(run, Manifest.read(path)))
    models = yield from _read(run.outputs.name, run.listed_models)
    for name, files in (models or {}).items():
        path = run.path / name
        yield from check(name, path, partial(_verify_model, path, files))
    if start := (yield from _read(run.timing.name, lambda: _last_start(run))):
        if start["base"] is not None and "weights" in identity:
            base, digest = Path(start["base"]), identity["weights"]["sha256"]
            yield _check(f"base {quoted(base)}", partial(_verify_base, base, digest))
        place, digest = Path(start["tokens"]), start["tokens_sha256"]
        yield _check(f"tokens {quoted(place)}", partial(_verify_store, place, digest))


def _check(what: str, check: Callable[[], object]) -> Finding:
    try:
        return Finding(what, True, str(check()))
    except (UserError, OSError) as error:
        return Finding(what, False, disk_fault(error) if isinstance(error, OSError) else str(error))


def _read(what: str, read: Callable[[], _T]) -> Generator[Finding, None, _T | None]:
    """Return what is read; where that fails, yield a finding and return None."""
    try:
        return read()
    except (UserError, OSError) as error:
        yield Finding(what, False, disk_fault(error) if isinstance(error, OSError) else str(error))
        return None


def _steps(run: RunFolder, checkpoints: Checkpoints) -> list[int]:
    steps = checkpoints.steps()
    if not steps and (saved := run.last_saved()) is not None:
        raise UserError(f"are gone, and there was one of step {saved}")
    return steps


def _last_start(run: RunFolder) -> dict[str, Any]:
    starts = [event for event in read_metrics(run.timing) if event["event"] == "begin"]
    if not starts:
        raise UserError("does not say which tokens the run was trained on")
    return starts[-1]


def _verify_store(folder: Path, sha256: str | None = None) -> str:
    if not folder.exists():
        raise UserError("are missing; a resumed run makes them again from data.sources")
    store = TokenStore.open(folder)
    store.verify()
    if sha256 is not None and store.header.sha256 != sha256:
        raise UserError("holds other tokens than those that the run was trained on")
    return f"{len(store):,} documents, {store.token_count:,} tokens, {len(store.header.files)} files"


def _verify_base(folder: Path, sha256: str | None) -> str:
    if not folder.is_dir():
        raise UserError("is missing, and a resumed run needs it; put it back, or resume with model.source=FOLDER")
    if digest_weights(str(folder)) != sha256:
        raise UserError("holds other weights than those with which the run began")
    files = weight_files(str(folder))
    return f"{len(files)} files, {sum(path.stat().st_size for path in files):,} bytes"


def _verify_checkpoint(checkpoints: Checkpoints, step: int) -> str:
    checkpoints.verify(step)
    return _format_size(Manifest.read(checkpoints.path(step)).files)


def _verify_model(folder: Path, files: Mapping[str, FileEntry]) -> str:
    if (fault := find_change(folder, files, whole=True)) is not None:
        raise DamageError(fault)
    return _format_size(files)


def _format_size(files: Mapping[str, FileEntry]) -> str:
    return f"{len(files)} files, {sum(entry.bytes for entry in files.values()):,} bytes"


def _verify_metrics(run: RunFolder, manifest: Manifest) -> str:
    entry = manifest.progress.metrics
    if entry_of(run.metrics, entry.bytes) != entry:
        raise DamageError(f"its first {entry.bytes:,} bytes are not those of the last checkpoint")
    return f"{entry.bytes:,} bytes up to the last checkpoint"
