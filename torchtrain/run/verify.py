"""What a run was trained on and whether every file with a digest is still what was written."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import FileEntry, differs, entry_of
from torchtrain.checkpoint.manifest import DamageError, Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config, load_config
from torchtrain.data.store import HEADER, TokenStore
from torchtrain.evaluation.results import Training
from torchtrain.modeling.load import digest_weights, weight_files
from torchtrain.run.folder import RunFolder


def training_of(config: Config, record: Mapping[str, Any]) -> Training:
    """Return how a run's models are trained.

    Args:
        config: the run's.
        record: of its setup, as `run.json` holds it: identity, and what the corpus is made of.
    """
    identity, corpus = record["identity"], record.get("corpus", {})
    data = identity.get("data", {})
    if "prepared" in data:  # a store by its fingerprint alone
        data = corpus.get("made_of") or {}
    return Training(
        model=config.model.source,
        variant=config.pack.variant,
        split=config.pack.split if config.pack.interleave else None,
        sequence_length=config.pack.sequence_length,
        rope=identity.get("model", {}).get("rope_parameters") or {},
        steps=config.train.steps,
        sequences_per_step=config.train.sequences_per_step,
        data=data,
    )


def read_training(path: Path) -> Training:
    """Return how the models of a run were trained.

    Raises:
        UserError: there is no run, or its record is damaged.
    """
    run = RunFolder(path)
    record = run.check_run()
    try:
        return training_of(Config.model_validate(record["config"]), record)
    except (ValidationError, AttributeError, TypeError):
        raise UserError(f"{quoted(run.record)}: is damaged: it lacks what its run is made of; put it back") from None


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: what it is, and what is wrong with it, or what was read."""

    what: str
    good: bool
    said: str

    def __str__(self) -> str:
        return f"{'good' if self.good else 'BAD':<5}{self.what}: {self.said}"


def verify_folder(folder: Path) -> Iterator[Finding]:
    """Check everything in a folder that has a digest, one thing after another.

    Args:
        folder: a token store's, or a run's; of a run its checkpoints, the beginning of `metrics.jsonl` that belongs to
            the last of them, the models it exported, and, wherever they lie, the store it was trained from and the
            weights beside which it trained adapters.

    Raises:
        UserError: it is neither.
    """
    run = RunFolder(folder)
    if (folder / HEADER).exists():
        yield _check(f"tokens {quoted(folder)}", lambda: _store(folder))
    elif run.record.exists():
        yield from _run(run, run.check_run())
    else:
        raise UserError(
            f"{quoted(folder)}: is neither a run's folder nor a token store's; give one with run.json or {HEADER}"
        )


def _run(run: RunFolder, record: dict[str, Any]) -> Iterator[Finding]:
    checkpoints = Checkpoints(run.checkpoints)
    steps: list[int] = []
    yield from _bad(run.config.name, lambda: load_config(run.config))  # which has no digest, and which resume reads
    yield from _bad("checkpoints", lambda: steps.extend(checkpoints.steps()))
    if not steps:
        yield from _bad("checkpoints", lambda: _check_none_was_saved(run))
    for step in steps:
        yield _check(f"checkpoint of step {step}", lambda step=step: _checkpoint(checkpoints, step))
    if steps:
        yield _check(run.metrics.name, lambda: _metrics(run, checkpoints.path(steps[-1])))
    models: dict[str, dict[str, FileEntry]] = {}
    yield from _bad("outputs.json", lambda: models.update(run.listed_models()))
    for name, files in models.items():
        yield _check(name, lambda name=name, files=files: _model(run.path / name, files))
    start: list[dict[str, Any]] = []
    yield from _bad(run.timing.name, lambda: start.append(_last_start(run)))
    for event in start:
        if event["base"] is not None:
            base, digest = Path(event["base"]), _look_up(record, "identity", "frozen", "sha256")
            yield _check(f"base {quoted(base)}", lambda base=base, digest=digest: _base(base, digest))
        place, digest = Path(event["tokens"]), event["tokens_sha256"]
        yield _check(f"tokens {quoted(place)}", lambda place=place, digest=digest: _store(place, digest))


def _last_start(run: RunFolder) -> dict[str, Any]:
    if (event := run.last_start()) is None:
        raise UserError("does not say which tokens the run was trained on")
    return event


def _look_up(record: Any, *keys: str) -> Any:
    """Return what a record holds in a place; None where it has no such place, whatever it is."""
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def _bad(what: str, check: Callable[[], object]) -> Iterator[Finding]:
    """Yield a finding only if there is something wrong."""
    found = _check(what, lambda: str(check()))
    if not found.good:
        yield found


def _check_none_was_saved(run: RunFolder) -> None:
    if (step := run.last_saved()) is not None:
        raise UserError(f"are gone, and there was one of step {step}")


def _check(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, check())
    except UserError as error:
        return Finding(what, False, str(error))
    except OSError as error:
        return Finding(what, False, disk_fault(error))


def _store(folder: Path, sha256: str | None = None) -> str:
    if not folder.exists():
        raise UserError("are not there; a resumed run makes them anew from data.sources")
    store = TokenStore.open(folder)
    store.verify()
    if sha256 is not None and store.header.sha256 != sha256:
        raise UserError("holds other tokens than those the run was trained on")
    return f"{len(store):,} documents, {store.token_count:,} tokens, {len(store.header.files)} files"


def _base(folder: Path, sha256: Any) -> str:
    if not folder.is_dir():
        raise UserError(
            "is not there, and a resumed run needs its weights; put it back, or resume with model.source=FOLDER"
        )
    if digest_weights(str(folder)) != sha256:
        raise UserError("holds other weights than those the run leaves as they are")
    files = weight_files(str(folder))
    return f"{len(files)} files, {sum(path.stat().st_size for path in files):,} bytes"


def _checkpoint(checkpoints: Checkpoints, step: int) -> str:
    checkpoints.verify(step)
    files = Manifest.read(checkpoints.path(step)).files
    return f"{len(files)} files, {sum(entry.bytes for entry in files.values()):,} bytes"


def _model(folder: Path, files: Mapping[str, FileEntry]) -> str:
    for name, entry in files.items():
        if damage := differs(folder / name, entry):
            raise DamageError(f"{quoted(folder / name)}: {damage}")
    return f"{len(files)} files, {sum(entry.bytes for entry in files.values()):,} bytes"


def _metrics(run: RunFolder, checkpoint: Path) -> str:
    entry = Manifest.read(checkpoint).progress.metrics
    if entry_of(run.metrics, entry.bytes) != entry:
        raise DamageError(f"its first {entry.bytes:,} bytes are not those of the last checkpoint")
    return f"{entry.bytes:,} bytes up to the last checkpoint"
