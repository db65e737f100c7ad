"""Results on disk, OUT/CHECKPOINT/TASK-LENGTH.json: numbers and what they depend on, or why a task did not run."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import entry_of, read_json, replace_file
from anchorline.settings import explain

_MOST_BYTES = 1 << 28


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Answer(_Strict):
    """What the model said to one sample (for choices: the number of one), and its score."""

    index: int
    prediction: str
    score: float
    part: str = ""  # of LongBench-E: the length of its context


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
    a mean over samples (perplexity of a corpus, BLEU) has no answers.
    """

    metric: str
    values: dict[str, float]
    cut_prompts: int  # were longer than the length leaves
    prompt_tokens: int
    computed_tokens: int
    training: Training | None = None  # None: a model as it was published
    answers: list[Answer]

    @property
    def parts(self) -> list[int]:
        """The numbers of the samples, ascending."""
        return sorted(answer.index for answer in self.answers)

    def scores(self, part: str = "") -> list[float]:
        """Return the score of each sample by its number, of one part of them if it is named; of a task without answers
        its one number.
        """
        ordered = sorted(self.answers, key=lambda answer: answer.index)
        scores = [answer.score for answer in ordered if part in ("", answer.part)]
        return scores if part or scores else [self.values[self.metric]]


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

    @property
    def parts(self) -> list[tuple[int, int, int]]:
        """The first position, the end and the number of documents of each bucket."""
        return [(bucket.first, bucket.end, len(bucket.losses)) for bucket in self.buckets]


class NotRun(_Strict):
    """A task that could not run."""

    format: Literal[2] = 2
    task: str
    length: int
    checkpoint: str
    not_run: str


Measurement = TaskResult | PerplexityResult
Result = TaskResult | PerplexityResult | NotRun


def weights_digest(folder: Path) -> str:
    """Return one SHA-256 of a model's config, tokenizer and weights."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    entries = {name: entry_of(folder / name).sha256 for name in names if name != "origin.json"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def result_path(out: Path, checkpoint: str, task: str, length: int) -> Path:
    """Return the file of a result."""
    return out / checkpoint / f"{task}-{length}.json"


def make_folder(folder: Path) -> None:
    """Make a folder of results. Raises UserError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def save_result(out: Path, result: Result) -> None:
    """Write a result below a folder; whoever reads it sees it whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    path = result_path(out, result.checkpoint, result.task, result.length)
    make_folder(path.parent)
    try:
        replace_file(path, (result.model_dump_json(indent=1) + "\n").encode())
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        UserError: it is damaged, of another version, or in the wrong place.
    """
    content = read_json(path, "results", _MOST_BYTES)
    kind: type[Result] = TaskResult
    if "not_run" in content or "buckets" in content:
        kind = NotRun if "not_run" in content else PerplexityResult
    try:
        result = kind.model_validate_json(json.dumps(content))
    except ValidationError as error:
        raise UserError(
            f"results: {quoted(path)}: is damaged, or of another version ({explain(kind, error)}); remove it, and "
            "evaluate again"
        ) from None
    if path.name != f"{result.task}-{result.length}.json" or path.parent.name != result.checkpoint:
        raise UserError(f"results: {quoted(path)}: is of {result.task} at {result.length}; move it back")
    return result


def read_results(out: Path) -> Iterator[Result]:
    """Yield the results below a folder, by checkpoint, task and length. Raises UserError as `read_result`."""
    yield from (read_result(path) for path in sorted(out.glob("*/*-[0-9]*.json")))


def different_setting(result: Measurement, settings: Settings) -> str:
    """Return the name of a setting in which a result differs from the others of its checkpoint; "": in none.

    Perplexity is measured without anchor and engine.
    """
    names = ("weights", "dtype", "engine", "anchor") if isinstance(result, TaskResult) else ("weights", "dtype")
    return next((name for name in names if getattr(result.settings, name) != getattr(settings, name)), "")
