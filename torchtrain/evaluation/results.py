"""Results on disk, OUT/CHECKPOINT/TASK-LENGTH.json: numbers and what they depend on, or why a task did not run."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from anchorline.errors import UserError, disk_fault, quoted
from anchorline.files import entry_of, read_file, replace_file
from torchtrain.config import Section

_MOST_BYTES = 1 << 28


class Answer(Section):
    """The model's answer to one sample (for choices: the number of one), and its score."""

    index: int
    prediction: str
    score: float
    part: str = ""  # of LongBench-E: the length of its context; of perplexity: positions


class Settings(Section):
    """The settings that decide a model's numbers, besides the samples."""

    weights: str  # SHA-256 of the checkpoint's files
    anchor: list[int]  # tokens that were put before each prompt
    dtype: str


class Training(Section):
    """How a checkpoint was trained."""

    model: str  # `model.source` of its run
    variant: str
    anchor: int | list[int] | Literal["auto"] = "auto"  # `pack.anchor`
    split: str | None = None  # `pack.split`, if the variant interleaves
    sequence_length: int
    rope: dict[str, Any]  # rope_parameters of the model that was trained
    steps: int  # of the whole run
    sequences_per_step: int
    data: dict[str, Any]  # sources and mixture; {} if they are not known


class _Kept(Section):
    format: Literal[2] = 2
    task: str
    length: int
    checkpoint: str


class NotRun(_Kept):
    """A task that could not run."""

    not_run: str


class TaskResult(_Kept):
    """One task at one length of one checkpoint.

    `metric` names the score of `answers`; `values` are all of lm-eval's numbers for the task. A task whose metric is
    not a mean over samples (perplexity of a corpus, BLEU) has no answers. Perplexity by position has an answer for each
    document and range of positions, whose score is the mean loss in nats.
    """

    step: int | None
    source: str
    settings: Settings
    samples: str  # SHA-256 of the prompts and targets, or of the documents
    identity: dict[str, Any]  # all that the samples depend on, known before anything runs
    device: str
    seconds: float
    versions: dict[str, str]
    created: str
    metric: str
    values: dict[str, float]
    cut_prompts: int = 0  # that were longer than the length allows
    prompt_tokens: int = 0
    computed_tokens: int = 0
    training: Training | None = None  # None: a model as it was published
    answers: list[Answer]

    @property
    def answered(self) -> list[tuple[str, int]]:
        """The part and number of each sample, ascending."""
        return sorted((answer.part, answer.index) for answer in self.answers)

    def scores(self, part: str = "") -> list[float]:
        """Return the score of each sample by its number, of one `part` or all; without answers the one number."""
        ordered = sorted(self.answers, key=lambda answer: answer.index)
        scores = [answer.score for answer in ordered if part in ("", answer.part)]
        return scores if part or scores else [self.values[self.metric]]


Result = TaskResult | NotRun
_RESULT: TypeAdapter[Result] = TypeAdapter(Result)


def weights_digest(folder: Path) -> str:
    """Return one SHA-256 of a model's config, tokenizer and weights."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", ".json"))
    entries = {name: entry_of(folder / name).sha256 for name in names if name != "origin.json"}
    return hashlib.sha256(json.dumps(entries, sort_keys=True).encode()).hexdigest()


def result_path(out: Path, checkpoint: str, task: str, length: int) -> Path:
    """Return the file of a result."""
    return out / checkpoint / f"{task}-{length}.json"


@contextmanager
def writing_to_out() -> Iterator[None]:
    """Turn an error of the disk into a UserError that names `--out`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--out: {disk_fault(error)}; choose a folder that can be written") from None


def save_result(out: Path, result: Result) -> None:
    """Write a result below a folder; a reader sees it whole or not at all. Raises UserError if it cannot be written."""
    path = result_path(out, result.checkpoint, result.task, result.length)
    with writing_to_out():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (result.model_dump_json(indent=1) + "\n").encode())


def read_result(path: Path) -> Result:
    """Read a result. Raises UserError if it is damaged, of another version, or in the wrong place."""
    try:
        result = _RESULT.validate_json(read_file(path, _MOST_BYTES))
    except OSError as error:
        raise UserError(f"results: {disk_fault(error)}") from None
    except ValidationError:
        raise UserError(
            f"results: {quoted(path)}: is damaged, or of another version; remove it, and evaluate again"
        ) from None
    if path.name != f"{result.task}-{result.length}.json" or path.parent.name != result.checkpoint:
        raise UserError(f"results: {quoted(path)}: is of {result.task} at {result.length}; move it back")
    return result


def read_results(out: Path) -> Iterator[Result]:
    """Yield the results below a folder, by checkpoint, task and length. Raises UserError as `read_result`."""
    yield from (read_result(path) for path in sorted(out.glob("*/*-[0-9]*.json")))


def different_setting(result: TaskResult, settings: Settings) -> str:
    """Return in which setting a result differs from its checkpoint's others, or "". Perplexity ignores the anchor."""
    names = ("weights", "dtype") if result.task == "perplexity" else ("weights", "dtype", "anchor")
    return next((name for name in names if getattr(result.settings, name) != getattr(settings, name)), "")
