"""A suite: which tasks are measured, on how many samples, made of what. YAML in, a strict schema out."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from anchorline import settings
from anchorline.errors import UserError, quoted
from anchorline.files import expand
from torchtrain.config import MOST_TOKENS, Count, Name, PathText, Section, Source

EXAMPLE = "samples=20"  # of an override, for messages
SUITE = Path("configs/eval/ruler.yaml")  # the default of `--suite`, from the repository's folder

# RULER's tasks as they are now, in RULER's order, and the tokens a model may generate for each.
TASKS: dict[str, int] = {
    "niah_single_1": 128,
    "niah_single_2": 128,
    "niah_single_3": 128,
    "niah_multikey_1": 128,
    "niah_multikey_2": 128,
    "niah_multikey_3": 128,
    "niah_multivalue": 128,
    "niah_multiquery": 128,
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
}
# Tasks that NVIDIA changed after the paper, as they were in October 2024, and the same tasks as they are now.
IN_2024 = {"vt_2024_10": "vt", "fwe_2024_10": "fwe"}
# The paper leaves these out for LLaMA-2, which scores nothing on them.
NOT_IN_ELEVEN = ("niah_multikey_3", "cwe")
# LongBench's six groups (arXiv 2308.14508, table 1), by the names of the paper's table.
LONGBENCH: dict[str, tuple[str, ...]] = {
    "Code Completion": ("lcc", "repobench-p"),
    "ICL": ("trec", "triviaqa", "samsum", "lsht"),
    "Multi-Doc QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "Single-Doc QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "Summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
}
HELLASWAG = "hellaswag"
_LEAST_LENGTH = 64
# The suite and the model decide these arguments of lm-eval's class for vLLM.
_NOT_VLLMS = frozenset({"pretrained", "tokenizer", "revision", "dtype", "seed", "max_model_len", "max_length"})


def room_of(task: str) -> int:
    """Return how many tokens a model may generate for one of RULER's tasks."""
    return TASKS[IN_2024.get(task, task)]


def setting_of(task: str, settings: dict[str, Any]) -> Any:
    """Return what a setting by the start of tasks' names says of a task; None: nothing."""
    return next((value for name, value in settings.items() if task == name or task.startswith(f"{name}_")), None)


def is_ruler(task: str) -> bool:
    """Return whether a task is RULER's."""
    return task in TASKS or task in IN_2024


def benchmark_of(task: str) -> str:
    """Return `ruler`, `longbench`, `mmlu`, `perplexity`, or the name of any other task."""
    if is_ruler(task):
        return "ruler"
    return next((name for name in ("longbench", "mmlu") if task.startswith(f"{name}_")), task)


class Haystack(Section):
    """The text in which needles are hidden: exactly one of `folder`, `demo`, `files`, `dataset`."""

    folder: PathText | None = Field(default=None, description="folder of .txt files, such as RULER's essays")
    demo: Literal["speeches", "encyclopedia", "code"] | None = Field(default=None, description="as in data.sources")
    files: PathText | None = Field(default=None, description="as in data.sources: glob of .jsonl or .parquet files")
    dataset: Name | None = Field(default=None, description="as in data.sources: folder or hub id of a data set")
    split: Name = Field(default="train", description="of the dataset")
    text_field: Name = Field(default="text", description="name of the field that holds the text")
    sentences: Literal["english", "untrained"] = Field(
        default="english",
        description="how sentences are found: by NLTK's punkt_tab for English, as RULER does (its data must be on "
        "this machine), or by NLTK's Punkt without training, which needs no data",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        kinds = [name for name in ("folder", "demo", "files", "dataset") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a haystack is exactly one of folder, demo, files, dataset; this one is {kinds or 'none'}"
            )
        return self

    @property
    def name(self) -> str:
        """The haystack's name in results."""
        kind = next(name for name in ("folder", "demo", "files", "dataset") if getattr(self, name) is not None)
        return f"{kind} {getattr(self, kind)}, sentences {self.sentences}"


class QuestionSet(Section):
    """Questions with documents as the hub has them."""

    dataset: Name = Field(description="as in data.sources: folder or hub id of a data set")
    subset: Name | None = Field(default=None, description="as in data.sources; of hotpotqa on the hub: distractor")
    split: Name = Field(default="validation", description="of the dataset")
    revision: Name | None = Field(default=None, description="commit or branch of the dataset; a commit pins its text")


class PerplexityConfig(Section):
    """Perplexity on long documents, by position."""

    source: Source
    documents: Count = Field(default=8, description="the first so many documents that are long enough")
    stride: Count | None = Field(
        default=None, description="tokens that a window of half the length moves; default: no windows"
    )


class Suite(Section):
    """What is measured."""

    tasks: list[Name] = Field(min_length=1, description="RULER's tasks, or any task, group or tag of lm-eval")
    samples: Count = Field(default=500, description="of each task and length, at most")
    fewshot: dict[Name, Annotated[int, Field(ge=0)]] = Field(
        default={},
        description="solved examples before each question, by the start of a task's name: {mmlu: 5}; default: its own",
    )
    chat_template: bool = Field(default=False, description="put each prompt into the model's chat template")
    seed: int = Field(default=42, ge=0, lt=2**32, description="RULER's is 42; each task is seeded with it alone")
    cache: PathText = Field(default="cache", description="folder of samples, answers and converted models")
    haystack: Haystack | None = None
    squad: PathText | QuestionSet | None = Field(
        default=None, description="for qa_1: SQuAD 2.0's dev-v2.0.json, or {dataset: rajpurkar/squad_v2}"
    )
    hotpotqa: PathText | QuestionSet | None = Field(
        default=None, description="for qa_2: hotpot_dev_distractor_v1.json, or {dataset: hotpotqa/hotpot_qa}"
    )
    data: dict[Name, PathText] = Field(
        default={},
        description="local data of lm-eval's tasks, by the start of their names: {mmlu: FOLDER}. The folder holds the "
        "published files of longbench, mmlu or hellaswag, or a data set as the hub has it",
    )
    perplexity: PerplexityConfig | None = None
    batch_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        default=16_384, description="tokens of prompts and answers whose keys and values are held at a time"
    )
    backend: Literal["torch", "vllm"] = Field(default="torch", description="what answers: this process, or vLLM")
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | Name] | None = Field(
        default=None,
        description="with backend torch: lay the layers on several GPUs by accelerate (auto), or say which module "
        "goes where: {model.embed_tokens: 0, ...}; default: one device holds all",
    )
    vllm: dict[Name, bool | int | float | str] = Field(
        default={}, description="further arguments of lm-eval's class for vLLM, such as tensor_parallel_size"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, description="default: as the weights are saved")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.vllm and self.backend != "vllm":
            raise ValueError("vllm belongs to backend vllm; remove it, or set backend: vllm")
        if taken := sorted(_NOT_VLLMS & set(self.vllm)):
            raise ValueError(
                f"vllm: {', '.join(taken)} cannot be set there: the suite and the model decide it; remove it"
            )
        if self.device_map is not None and self.backend != "torch":
            raise ValueError("device_map belongs to backend torch; remove it (vllm: {tensor_parallel_size: 8} spreads)")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError("tasks: one is named twice; remove it")
        for old, new in IN_2024.items():
            if {old, new} <= set(self.tasks):
                raise ValueError(f"tasks: {new} and {old} are one task at two times; keep one")
        return self


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite's YAML.

    Raises:
        UserError: as `anchorline.settings.load`; or a folder of data is named that does not exist.
    """
    if not os.path.lexists(path) and Path(path) == SUITE:
        raise UserError(f"--suite: the default {SUITE} is not here; go to the repository's folder, or name a suite")
    suite = settings.load(Suite, path, overrides, example=EXAMPLE)
    for name, folder in suite.data.items():
        if not expand(folder).is_dir():
            raise UserError(f"data.{name} {quoted(folder)}: there is no such folder; correct it or leave it out")
    return suite


def parse_lengths(text: str) -> list[int]:
    """Return the lengths of `--lengths`, ascending.

    Raises:
        UserError: one is not a whole number, too small, or given twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts):
        raise UserError(f"--lengths {quoted(text)}: write whole numbers with commas, such as 4096,8192")
    lengths = sorted(map(int, parts))
    if len(set(lengths)) != len(lengths):
        raise UserError(f"--lengths {quoted(text)}: one is given twice; remove it")
    if not _LEAST_LENGTH <= lengths[0] <= lengths[-1] <= MOST_TOKENS:
        raise UserError(f"--lengths {quoted(text)}: give lengths from {_LEAST_LENGTH} to {MOST_TOKENS:,}")
    return lengths
