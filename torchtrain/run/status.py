"""What a run left: where it is, how its models were trained, and whether every file with a digest is intact."""

import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anchorline.errors import UserError, disk_fault, one_line, quoted
from anchorline.files import FileEntry, differs, entry_of, expand, read_json
from torchtrain.checkpoint.folder import CheckpointFolder
from torchtrain.checkpoint.manifest import DamageError, Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.config import Config, load_config
from torchtrain.data.store import HEADER, TokenStore
from torchtrain.evaluation.results import Training
from torchtrain.modeling.load import digest_weights, weight_files
from torchtrain.run.folder import RunFolder
from torchtrain.run.lock import is_held
from torchtrain.training.events import read_metrics, step_status


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


_LAST = 20  # steps whose time tells how long the others will take
_MOST_BYTES = 1 << 26
_LONGEST = 8.6e13  # seconds that timedelta takes


def status_lines(folder: Path) -> Iterator[str]:
    """Yield a line for each thing that is known of a run.

    Raises:
        UserError: the folder holds no run, or its record is damaged. Of other damaged files a line says so.
    """
    try:
        yield from _lines(folder)
    except OSError as error:
        raise UserError(disk_fault(error)) from None


def _lines(folder: Path) -> Iterator[str]:
    run = RunFolder(folder)
    record = run.check_run()
    total = record["config"]["train"]["steps"]
    at_work = is_held(run.record)
    finished = run.finished
    state = "at work" if at_work else "finished" if finished else "interrupted"
    yield f"run        {run.path}: {state}"

    events, timings = [], []
    for held, path in ((events, run.metrics), (timings, run.timing)):
        try:
            held += read_metrics(path)
        except UserError as error:
            yield f"damaged    {error}"
    steps = [event for event in events if event["event"] == "step"]
    speeds = [e for e in timings if e["event"] == "step" and {"seconds", "tokens_per_second"} <= e.keys()]
    done = steps[-1]["step"] if steps else 0
    yield f"steps      {done:,} of {total:,}"
    if steps and speeds:
        yield f"last step  {one_line(step_status(speeds[-1] | steps[-1]))}"
        if done < total:
            left = (total - done) * statistics.median(event["seconds"] for event in speeds[-_LAST:])
            when = "" if at_work else ", once it is resumed"
            yield f"time left  about {timedelta(seconds=round(min(left, _LONGEST)))}{when}"
    for event in events:
        if event["event"] == "evaluation":
            loss = "none" if event["loss"] is None else f"{event['loss']:.4f}"
            yield f"held out   loss {loss} after step {event['step']:,}"

    checkpoints = CheckpointFolder(run.checkpoints)
    try:
        saved = checkpoints.steps()
    except UserError as error:
        saved = []
        yield f"damaged    {error}"
    for step in saved:
        word = "" if checkpoints.looks_good(step) else ", damaged"
        yield f"checkpoint step {step:,}{word}"
    for path in sorted(run.bad_steps.glob("step-*.json")):
        try:
            yield f"bad step   {int(read_json(path, most=_MOST_BYTES)['step']):,}: its rows are in {path}"
        except (UserError, LookupError, TypeError, ValueError, OverflowError) as error:
            yield f"bad step   damaged: {error if isinstance(error, UserError) else f'{path}: names no step'}"
    for path in run.exports_of_steps():
        yield f"model      {path}"
    if run.model.is_dir():
        yield f"model      {run.model}"
    if not at_work and not finished:
        yield f"to go on   torchtrain resume {run.path}"


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
    if isinstance(sha256 := _look_up(record, "identity", "frozen", "sha256"), str):
        base = _find_base(record, checkpoints.path(steps[-1]) if steps else None)
        yield _check(f"base {quoted(base)}", lambda: _base(base, sha256))
    tokens, cache = _look_up(record, "corpus_fingerprint"), _look_up(record, "config", "data", "cache")
    if isinstance(tokens, str) and isinstance(cache, str):
        held = _look_up(record, "corpus_folder")
        place = Path(held) if isinstance(held, str) else expand(cache).absolute() / "corpus" / tokens
        yield _check(f"tokens {quoted(place)}", lambda: _store(place, _look_up(record, "identity", "tokens", "sha256")))
    else:
        yield Finding(run.record.name, False, "does not say which tokens the run was trained on")


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


def _store(folder: Path, sha256: Any = None) -> str:
    if not folder.exists():
        raise UserError("are not there; a resumed run makes them anew from data.sources")
    store = TokenStore.open(folder)
    store.verify()
    if sha256 is not None and store.sha256 != sha256:
        raise UserError("holds other tokens than those the run was trained on")
    return f"{len(store):,} documents, {store.token_count:,} tokens, {len(store.digests)} files"


def _find_base(record: dict[str, Any], checkpoint: Path | None) -> Path:
    """Return where the weights lie that a run with adapters leaves as they are: it may have gone on with them elsewhere
    than where it began.
    """
    begun, found = _look_up(record, "config", "model", "source"), _look_up(record, "model_folder")
    if checkpoint is not None:
        with suppress(UserError, OSError):  # a bad one is told by itself
            last = _look_up(Manifest.read(checkpoint).config, "model", "source")
            if isinstance(last, str) and last != begun:
                return expand(last)
    return Path(found) if isinstance(found, str) else expand(str(begun))


def _base(folder: Path, sha256: str) -> str:
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
