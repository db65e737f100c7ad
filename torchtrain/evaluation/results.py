"""Results on disk: one file a checkpoint, task and length, with all that is needed to repeat it, or why it did not run.

OUT/CHECKPOINT/TASK-LENGTH.json
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import entry_of, read_json, replace_file
from anchorline.settings import explain
from torchtrain.evaluation.suite import HELLASWAG, LONGBENCH, TASKS, group_of

_NAME = re.compile(r"([a-z][a-z0-9_-]*)-(\d+)\.json")
_MOST_BYTES = 1 << 28
Unit = Annotated[float, Field(ge=0, le=1)]


def _is_task(name: str) -> bool:
    known = {*TASKS, HELLASWAG, *(f"longbench_{task}" for tasks in LONGBENCH.values() for task in tasks)}
    if not name.startswith("mmlu_"):
        return name in known
    try:
        return name in group_of("mmlu")
    except ValueError:  # only lm-eval knows the subjects, and results are read without it, too
        return True


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Answer(_Strict):
    """What the model said to one sample, and what it is worth.

    Where it chose: `prediction` is its choice's number, `acc` whether that of the largest likelihood is right, which is
    the score but for HellaSwag, `log_likelihoods` log p of each choice in nats (None: from before it was recorded).
    """

    index: int
    prediction: str
    score: Unit
    acc: Unit | None = None
    log_likelihoods: list[float] | None = None


class Settings(_Strict):
    """What of a computation decides its numbers: a result with others of these is another result."""

    weights: str  # SHA-256 of the checkpoint's files
    samples: str  # SHA-256 of the samples
    anchor: list[int]  # tokens that were put before each prompt
    dtype: str
    engine: dict[str, Any] = {}  # what answers, where it is not torch in this process: its name and arguments
    scoring: dict[str, str] = {}  # versions of the packages that LongBench's scores come from


class Training(_Strict):
    """How a checkpoint was trained: what a published number must agree in to stand beside its results."""

    model: str  # `model.source` of its run
    variant: str
    sequence_length: int
    rope: dict[str, Any]  # rope_parameters of the model that was trained
    steps: int  # of the whole run
    sequences_per_step: int
    data: dict[str, Any]  # what its tokens depend on: sources, mixture; {} where that is not known


class TaskResult(_Strict):
    """One task at one length of one checkpoint."""

    format: Literal[1] = 1
    task: str
    length: int
    checkpoint: str
    step: int | None
    source: str
    settings: Settings
    identity: dict[str, Any]
    attention: str
    device: str
    shares_prefixes: bool
    prompt_tokens: int
    computed_tokens: int
    batch_tokens: int | None = None  # held at a time; None: not known
    seconds: float
    versions: dict[str, str]
    created: str
    training: Training | None = None  # None: a model as it was published, or a result from before this was recorded
    answers: Annotated[list[Answer], Field(min_length=1)]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        indices = [answer.index for answer in self.answers]
        if len(set(indices)) != len(indices):
            raise ValueError("answers: one sample stands there twice")
        if not _is_task(self.task):
            raise ValueError(f"task {self.task}: is none of ours")
        return self

    @property
    def indices(self) -> list[int]:
        """Of the samples, ascending."""
        return sorted(answer.index for answer in self.answers)

    @property
    def scores(self) -> list[float]:
        """Of each sample, by its index."""
        return [answer.score for answer in sorted(self.answers, key=lambda answer: answer.index)]


class Bucket(_Strict):
    """Positions [first, end), and the mean loss there of each document, in nats."""

    first: int
    end: int
    losses: list[float]


class PerplexityResult(_Strict):
    """Losses on long documents at one length of one checkpoint."""

    format: Literal[1] = 1
    task: Literal["perplexity"] = "perplexity"
    length: int
    checkpoint: str
    step: int | None
    source: str
    settings: Settings
    text: str
    identity: dict[str, Any] = {}  # the suite's `perplexity`; {}: a result from before this was recorded
    device: str | None = None
    buckets: list[Bucket]
    strided: float | None  # mean loss in windows of half the length, if they were asked for
    seconds: float
    versions: dict[str, str]
    created: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        counts = {len(bucket.losses) for bucket in self.buckets}
        if len(counts) != 1 or 0 in counts:
            raise ValueError("buckets: they are of different documents, or of none")
        edges = [(bucket.first, bucket.end) for bucket in self.buckets]
        if any(first >= end for first, end in edges) or any(a[1] != b[0] for a, b in pairwise(edges)):
            raise ValueError("buckets: one does not begin where the one before ends")
        return self


class NotRun(_Strict):
    """A task that could not run."""

    format: Literal[1] = 1
    task: str
    length: int
    checkpoint: str
    not_run: str


def weights_digest(folder: Path) -> str:
    """Return one SHA-256 of a model's config, tokenizer and weights.

    Raises:
        UserError: a file cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    try:
        entries = {name: entry_of(folder / name).sha256 for name in names if name != "origin.json"}
    except OSError as error:
        raise UserError(f"{quoted(folder)}: {disk_fault(error)}") from None
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def result_path(out: Path, checkpoint: str, task: str, length: int) -> Path:
    """Return where a result stands."""
    return out / checkpoint / f"{task}-{length}.json"


def check_out(out: Path) -> None:
    """Check, before anything is measured, that results can be written below a folder that there may not be yet.

    Raises:
        UserError: they cannot.
    """
    place = next(place for place in (out.absolute(), *out.absolute().parents) if os.path.lexists(place))
    fault = None if place.is_dir() else errno.ENOTDIR
    if fault is None and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        fault = errno.EACCES
    if fault is not None:
        raise UserError(f"--out: {quoted(place)}: {os.strerror(fault).lower()}; choose a folder that can be written")


def save_result(path: Path, result: BaseModel) -> None:
    """Write a result; whoever reads it sees it whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (result.model_dump_json(indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


Found = TaskResult | NotRun | PerplexityResult


def read_result(path: Path) -> Found:
    """Read a result.

    Raises:
        UserError: it is damaged, or not one of ours.
    """
    content = read_json(path, "results", _MOST_BYTES)
    kind: type[Found] = TaskResult
    if "not_run" in content or "buckets" in content:
        kind = NotRun if "not_run" in content else PerplexityResult
    try:
        return kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise UserError(
            f"results: {quoted(path)}: is damaged, or of another version ({explain(kind, error)}); remove it, and it "
            "is measured again"
        ) from None


def finished_result(path: Path, settings: Settings) -> TaskResult | PerplexityResult | None:
    """Return the result that stands there already, None where there is none.

    Raises:
        UserError: it is damaged, or of another checkpoint, samples or settings.
    """
    try:
        path.lstat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise UserError(f"--out: {disk_fault(error)}") from None
    found = read_result(path)
    if isinstance(found, NotRun):
        return None
    if found.settings != settings:
        was, now = found.settings.model_dump(), settings.model_dump()
        name = next(name for name in was if was[name] != now[name])
        raise UserError(
            f"--out: {quoted(path)} was measured with other {name} ({quoted(was[name], 20)}, now "
            f"{quoted(now[name], 20)}); choose another --out, or remove it"
        )
    return found


def finished_or_none(path: Path, settings: Settings) -> TaskResult | PerplexityResult | None:
    """As `finished_result`, but that what is of something else, or damaged, is none."""
    try:
        return finished_result(path, settings)
    except UserError:
        return None


def alike_in(result: "TaskResult | PerplexityResult") -> tuple[str, ...]:
    """Return in which `Settings` all results of a checkpoint agree, or an average would be over several models."""
    return ("weights", "dtype", "engine", "anchor") if isinstance(result, TaskResult) else ("weights", "dtype")


def check_one_model(out: Path, checkpoint: str, settings: Settings) -> None:
    """Check that all results of a checkpoint below a folder are of one model, asked in one way.

    Args:
        out: the folder.
        checkpoint: its name.
        settings: of a task that will be measured.

    Raises:
        UserError: one is of other weights or dtype, or of a task with another anchor or engine (an average would be
            over both), or is damaged.
    """
    for path in sorted((out / checkpoint).glob("*.json")):
        if not _NAME.fullmatch(path.name) or isinstance(found := read_result(path), NotRun):
            continue
        for name in alike_in(found):
            was, now = getattr(found.settings, name), getattr(settings, name)
            if was != now:
                raise UserError(
                    f"--out: {quoted(path)} was measured with other {name} ({quoted(was, 20)}, now {quoted(now, 20)}); "
                    "choose another --out, or remove it"
                )


def holds_scores(path: Path) -> bool:
    """Return whether a task's scores stand there, of whatever checkpoint.

    Raises:
        UserError: what stands there is damaged.
    """
    return path.exists() and not isinstance(read_result(path), NotRun)


def read_results(out: Path) -> Iterator[Found]:
    """Yield the results below a folder, by checkpoint, task and length.

    Raises:
        UserError: one is damaged, or stands where another should.
    """
    for path in sorted(out.glob("*/*.json")):
        if not _NAME.fullmatch(path.name):
            continue
        found = read_result(path)
        if result_path(out, found.checkpoint, found.task, found.length) != path:
            raise UserError(f"results: {quoted(path)}: is of {found.task} at {found.length}; move it back")
        yield found
