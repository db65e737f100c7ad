"""Results on disk: a file for each checkpoint, task and length, with what its numbers depend on, or why it did not run.

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

_NAME = re.compile(r"(.+)-(\d+)\.json")
_MOST_BYTES = 1 << 28


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Answer(_Strict):
    """What the model said to one sample (of a choice: its number), and its score."""

    index: int
    prediction: str
    score: float


class Settings(_Strict):
    """What of a computation decides its numbers, besides the samples."""

    weights: str  # SHA-256 of the checkpoint's files
    anchor: list[int]  # tokens that were put before each prompt
    dtype: str
    engine: dict[str, Any] = {}  # what answers, where it is not torch in this process: its name and arguments


class Training(_Strict):
    """How a checkpoint was trained: a published number is shown beside its results only where all of this agrees."""

    model: str  # `model.source` of its run
    variant: str
    split: str | None = None  # `pack.split`, where the variant interleaves
    sequence_length: int
    rope: dict[str, Any]  # rope_parameters of the model that was trained
    steps: int  # of the whole run
    sequences_per_step: int
    data: dict[str, Any]  # what its tokens depend on: sources, mixture; {} where that is not known


class _Result(_Strict):
    format: Literal[2] = 2
    task: str
    length: int
    checkpoint: str
    step: int | None
    source: str
    settings: Settings
    samples: str  # SHA-256 of the prompts and targets, or of the documents
    identity: dict[str, Any]  # what the samples depend on, known before anything runs
    device: str
    seconds: float
    versions: dict[str, str]
    created: str


class TaskResult(_Result):
    """One task at one length of one checkpoint.

    `metric` is the score of `answers`; `values` are all of lm-eval's numbers for the task. A task whose metric is not
    one of single samples (perplexity of a corpus, BLEU) has no answers.
    """

    metric: str
    values: dict[str, float]
    cut_prompts: int  # were longer than the length leaves
    prompt_tokens: int
    computed_tokens: int
    training: Training | None = None  # None: a model as it was published
    answers: list[Answer]

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len(set(self.indices)) != len(self.answers):
            raise ValueError("answers: one sample is there twice")
        return self

    @property
    def indices(self) -> list[int]:
        """Of the samples, ascending."""
        return sorted(answer.index for answer in self.answers)

    @property
    def scores(self) -> list[float]:
        """Of each sample, by its index; of a task without answers its one number."""
        scores = [answer.score for answer in sorted(self.answers, key=lambda answer: answer.index)]
        return scores or [self.values[self.metric]]


class Bucket(_Strict):
    """Positions [first, end), and the mean loss there of each document, in nats."""

    first: int
    end: int
    losses: Annotated[list[float], Field(min_length=1)]


class PerplexityResult(_Result):
    """Losses on long documents at one length of one checkpoint."""

    task: Literal["perplexity"] = "perplexity"
    text: str
    buckets: list[Bucket]
    strided: float | None  # mean loss in windows of half the length, if they were asked for

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if len({len(bucket.losses) for bucket in self.buckets}) != 1:
            raise ValueError("buckets: they are of different documents")
        edges = [(bucket.first, bucket.end) for bucket in self.buckets]
        if any(first >= end for first, end in edges) or any(a[1] != b[0] for a, b in pairwise(edges)):
            raise ValueError("buckets: one does not begin where the one before ends")
        return self


class NotRun(_Strict):
    """A task that could not run."""

    format: Literal[2] = 2
    task: str
    length: int
    checkpoint: str
    not_run: str


Measurement = TaskResult | PerplexityResult
Found = TaskResult | NotRun | PerplexityResult


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
    """Return the file of a result."""
    return out / checkpoint / f"{task}-{length}.json"


def check_out(out: Path) -> None:
    """Check, before anything is measured, that results can be written into a folder, which need not exist yet.

    Raises:
        UserError: they cannot.
    """
    place = next(place for place in (out.absolute(), *out.absolute().parents) if os.path.lexists(place))
    fault = None if place.is_dir() else errno.ENOTDIR
    if fault is None and not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        fault = errno.EACCES
    if fault is not None:
        raise UserError(f"--out: {quoted(place)}: {os.strerror(fault).lower()}; choose a folder that can be written")


def save_result(out: Path, result: Found) -> None:
    """Write a result below a folder; whoever reads it sees it whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    path = result_path(out, result.checkpoint, result.task, result.length)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (result.model_dump_json(indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def read_result(path: Path) -> Found:
    """Read a result.

    Raises:
        UserError: it is damaged, of another version, or in the wrong place.
    """
    content = read_json(path, "results", _MOST_BYTES)
    kind: type[Found] = TaskResult
    if "not_run" in content or "buckets" in content:
        kind = NotRun if "not_run" in content else PerplexityResult
    try:
        found = kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise UserError(
            f"results: {quoted(path)}: is damaged, or of another version ({explain(kind, error)}); remove it, and "
            "evaluate again"
        ) from None
    if path.name != f"{found.task}-{found.length}.json" or path.parent.name != found.checkpoint:
        raise UserError(f"results: {quoted(path)}: is of {found.task} at {found.length}; move it back")
    return found


def holds_scores(path: Path) -> bool:
    """Return whether a file holds scores, of whatever checkpoint.

    Raises:
        UserError: it is damaged.
    """
    return path.exists() and not isinstance(read_result(path), NotRun)


def read_results(out: Path) -> Iterator[Found]:
    """Yield the results below a folder, by checkpoint, task and length.

    Raises:
        UserError: one is damaged, or in the wrong place.
    """
    yield from (read_result(path) for path in sorted(out.glob("*/*.json")) if _NAME.fullmatch(path.name))


def finished_result(path: Path, settings: Settings, identity: dict[str, Any]) -> Measurement | None:
    """Return the result that a file holds already; None: there is none.

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
    was, now = (
        {**of.model_dump(), "samples": made} for of, made in ((found.settings, found.identity), (settings, identity))
    )
    _refuse_change(path, was, now, list(was))
    return found


def check_one_model(out: Path, checkpoint: str, settings: Settings) -> None:
    """Check that all results of a checkpoint below a folder are of one model, asked in one way.

    Raises:
        UserError: one is of other weights, dtype, anchor or engine (an average would be over both), or is damaged.
    """
    for path in sorted((out / checkpoint).glob("*.json")):
        if _NAME.fullmatch(path.name) and not isinstance(found := read_result(path), NotRun):
            _refuse_change(path, found.settings.model_dump(), settings.model_dump(), alike_in(found))


def alike_in(result: Measurement) -> list[str]:
    """Return in which settings all results of a checkpoint agree; perplexity is measured without anchor and engine."""
    return ["weights", "dtype", "engine", "anchor"] if isinstance(result, TaskResult) else ["weights", "dtype"]


def _refuse_change(path: Path, was: dict[str, Any], now: dict[str, Any], names: list[str]) -> None:
    for name in names:
        if was[name] != now[name]:
            told = f" ({quoted(was[name], 20)}, now {quoted(now[name], 20)})" if name != "samples" else ""
            raise UserError(
                f"--out: {quoted(path)} was measured with other {name}{told}; choose another --out, or remove it"
            )
