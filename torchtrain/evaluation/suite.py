"""A suite: which tasks, how many samples, of which materials. YAML in, a strict schema out."""

import difflib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from anchorline import settings
from anchorline.errors import UserError, quoted
from anchorline.files import expand
from torchtrain.config import MOST_TOKENS, Count, Name, PathText, Section, Source

EXAMPLE = "samples=20"  # of an override, for messages
SUITE = Path("configs/eval/ruler.yaml")  # the default of `--suite`, from the repository's folder

# Tokens a model may generate, and whether all answers count, each by its share, or any of them does: RULER's own.
Metric = Literal["all", "any"]
TASKS: dict[str, tuple[int, Metric]] = {
    "niah_single_1": (128, "all"),
    "niah_single_2": (128, "all"),
    "niah_single_3": (128, "all"),
    "niah_multikey_1": (128, "all"),
    "niah_multikey_2": (128, "all"),
    "niah_multikey_3": (128, "all"),
    "niah_multivalue": (128, "all"),
    "niah_multiquery": (128, "all"),
    "vt": (30, "all"),
    "vt_2024_10": (30, "all"),
    "cwe": (120, "all"),
    "fwe": (50, "all"),
    "qa_1": (32, "any"),
    "qa_2": (32, "any"),
}
# The paper leaves these out for LLaMA-2, on which they measure nothing.
NOT_IN_ELEVEN = ("niah_multikey_3", "cwe")
# LongBench's six groups (arXiv 2308.14508, table 1), by the names that the paper's table has.
LONGBENCH: dict[str, tuple[str, ...]] = {
    "Code Completion": ("lcc", "repobench-p"),
    "ICL": ("trec", "triviaqa", "samsum", "lsht"),
    "Multi-Doc QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "Single-Doc QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "Summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
}
CHINESE = ("lsht", "dureader", "multifieldqa_zh", "vcsum", "passage_retrieval_zh")
LEAST_LENGTH = 512  # tokens: below, the questions alone take most of the room
# Of lm-eval's class for vLLM, what the suite and the model decide; and what lm-eval's log takes for a model's name.
_NOT_VLLMS = frozenset(
    {
        *("pretrained", "tokenizer", "revision", "tokenizer_revision", "lora_local_path", "dtype", "seed"),
        *("max_model_len", "max_length", "backend", "model", "peft", "delta", "path", "engine"),
    }
)
NEEDS_HAYSTACK = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")


class Haystack(Section):
    """The text in which needles are hidden: exactly one of `folder`, `demo`, `files`, `dataset`."""

    folder: PathText | None = Field(default=None, description="folder of .txt files, such as RULER's essays")
    demo: Literal["speeches", "encyclopedia", "code"] | None = Field(default=None, description="as in data.sources")
    files: PathText | None = Field(default=None, description="as in data.sources: glob of .jsonl or .parquet files")
    dataset: Name | None = Field(default=None, description="as in data.sources: folder or hub id of a data set")
    split: Name = "train"
    text_field: Name = "text"
    sentences: Literal["english", "untrained"] = Field(
        default="english",
        description="what finds a sentence's end: NLTK's punkt_tab for English, as RULER does (its data must be on "
        "this machine), or NLTK's Punkt without training, which needs none",
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
        """What results call it."""
        kind = next(name for name in ("folder", "demo", "files", "dataset") if getattr(self, name) is not None)
        return f"{kind} {getattr(self, kind)}, sentences {self.sentences}"


class Published(Section):
    """The published questions of a benchmark: exactly one of `folder` and `dataset`."""

    folder: PathText | None = Field(default=None, description="folder of the benchmark's own files")
    dataset: Name | None = Field(default=None, description="as in data.sources: folder or hub id of a data set")
    revision: Name | None = Field(default=None, description="commit or branch of the dataset; a commit pins its text")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.folder is None) == (self.dataset is None):
            raise ValueError("give exactly one of folder (the benchmark's own files) and dataset")
        if self.revision is not None and self.dataset is None:
            raise ValueError("revision belongs to a dataset; remove it")
        return self


class QuestionSet(Section):
    """Questions with documents as the hub has them, where a suite does not name the published file."""

    dataset: Name = Field(description="as in data.sources: folder or hub id of a data set")
    subset: Name | None = Field(default=None, description="as in data.sources; of hotpotqa on the hub: distractor")
    split: Name = "validation"
    revision: Name | None = Field(default=None, description="commit or branch of the dataset; a commit pins its text")


class PerplexityConfig(Section):
    """Perplexity on long documents, by position."""

    source: Source
    documents: Count = Field(default=8, description="the first so many that are long enough")
    stride: Count | None = Field(
        default=None, description="tokens a window moves, each seen with all the context it holds; default: no windows"
    )


class Suite(Section):
    """What is measured."""

    tasks: list[Name] = Field(min_length=1)
    samples: Count = Field(default=500, description="of each task and length")
    seed: int = Field(default=42, ge=0, lt=2**32, description="RULER's is 42; each task is seeded with it alone")
    cache: PathText = Field(default="cache", description="folder of generated samples and converted models")
    haystack: Haystack | None = None
    squad: PathText | QuestionSet | None = Field(
        default=None, description="SQuAD 2.0's dev-v2.0.json, or {dataset: rajpurkar/squad_v2}"
    )
    hotpotqa: PathText | QuestionSet | None = Field(
        default=None, description="HotpotQA's hotpot_dev_distractor_v1.json, or {dataset: hotpotqa/hotpot_qa}"
    )
    longbench: Published | None = Field(
        default=None, description="a folder with NAME.jsonl of each task (or data/NAME.jsonl), as in data.zip"
    )
    longbench_prompt: int | None = Field(
        default=None,
        ge=64,
        description="tokens a prompt of LongBench is cut to, in its middle; default: what the length leaves beside "
        "the answer. LongBench's own: 3500 for models of 4K, 31500 of 32K",
    )
    mmlu: Published | None = Field(
        default=None, description="a folder with test/SUBJECT_test.csv and dev/SUBJECT_dev.csv, as in data.tar"
    )
    mmlu_shots: Annotated[int, Field(ge=0, le=5)] = Field(default=5, description="solved questions before each")
    hellaswag: Published | None = Field(default=None, description="a folder with hellaswag_val.jsonl")
    perplexity: PerplexityConfig | None = None
    batch_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        default=16_384, description="tokens of prompts and answers whose keys and values are held at a time"
    )
    backend: Literal["torch", "vllm"] = Field(default="torch", description="what answers: this process, or vLLM")
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | Name] | None = Field(
        default=None,
        description="backend torch: lay the layers on several GPUs, by accelerate, as lm-eval's parallelize does "
        "(auto); or say which module lies where: {model.embed_tokens: 0, ...}; default: one device holds all",
    )
    vllm: dict[Name, bool | int | float | str] = Field(
        default={}, description="further arguments of lm-eval's class for vLLM, such as tensor_parallel_size"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, description="default: as the weights are saved")

    @field_validator("tasks")
    @classmethod
    def _groups_are_tasks(cls, tasks: list[str]) -> list[str]:
        """Write out the names of groups: `longbench`, `longbench_en`, `mmlu`."""
        return [task for name in tasks for task in group_of(name)]

    @model_validator(mode="after")
    def _tasks_are_known(self) -> Self:
        for name in self.tasks:
            if name in TASKS or name == HELLASWAG or name in group_of("longbench"):
                continue
            if name.startswith("mmlu_") and name in group_of("mmlu"):
                continue
            known = [*TASKS, "longbench", "longbench_en", "mmlu", HELLASWAG]
            each = [*known, *group_of("longbench"), *(group_of("mmlu") if name.startswith("mmlu") else ())]
            near = difflib.get_close_matches(name[:100], each, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"task {name[:100]!r} is not known; {hint}")
        if self.vllm and self.backend != "vllm":
            raise ValueError("vllm belongs to backend vllm; remove it, or set backend: vllm")
        if taken := sorted(_NOT_VLLMS & set(self.vllm)):
            raise ValueError(
                f"vllm: {', '.join(taken)} cannot be set there: the model is the one that is evaluated, its room "
                "follows --lengths, and dtype and seed are the suite's own; remove it"
            )
        if self.device_map is not None and self.backend != "torch":
            raise ValueError("device_map belongs to backend torch; remove it (vllm: {tensor_parallel_size: 8} spreads)")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError("tasks: one stands twice; remove it")
        if {"vt", "vt_2024_10"} <= set(self.tasks):
            raise ValueError("tasks: vt and vt_2024_10 are the same task at two times; an average takes one")
        return self


HELLASWAG = "hellaswag"
CHOICES = ("mmlu", HELLASWAG)  # benchmarks that ask for likelihoods


def benchmark_of(task: str) -> str:
    """Return `ruler`, `longbench`, `mmlu` or `hellaswag`."""
    if task in TASKS:
        return "ruler"
    return task if task == HELLASWAG else task.partition("_")[0]


@cache
def group_of(name: str) -> tuple[str, ...]:
    """Return the tasks that a name stands for: of a group all of them, else itself.

    Raises:
        ValueError: lm-eval, which has the subjects of MMLU, is not installed.
    """
    if name in ("longbench", "longbench_en"):
        all_of_them = (task for tasks in LONGBENCH.values() for task in tasks)
        return tuple(f"longbench_{task}" for task in all_of_them if name == "longbench" or task not in CHINESE)
    if name == "mmlu":
        found = sorted(path.stem for path in library_folder("mmlu/default").glob("mmlu_*.yaml"))
        return tuple(found)
    return (name,)


def library_folder(tasks: str) -> Path:
    """Return a folder of tasks of the installed lm-eval, without importing it.

    Raises:
        ValueError: it is not installed, or has no such folder.
    """
    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise ValueError("the package lm_eval is not installed: pip install 'anchorline[eval]'")
    folder = Path(found.submodule_search_locations[0]) / "tasks" / tasks
    if not folder.is_dir():
        raise ValueError(f"lm-eval has no tasks {tasks}, which that of 0.4.13 has; pip install lm_eval==0.4.13")
    return folder


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite's YAML.

    Raises:
        UserError: as `anchorline.settings.load`; or a folder of material is named, and is not there.
    """
    if not os.path.lexists(path) and Path(path) == SUITE:
        raise UserError(f"--suite: the default {SUITE} is not here; go to the repository's folder, or name a suite")
    suite = settings.load(Suite, path, overrides, example=EXAMPLE)
    for name in Suite.model_fields:
        folder = getattr(getattr(suite, name), "folder", None)
        if folder is not None and not expand(folder).is_dir():
            raise UserError(f"{name}.folder {quoted(folder)}: there is no such folder; correct it or leave it out")
    return suite


def parse_lengths(text: str) -> list[int]:
    """Return the lengths of `--lengths`, ascending.

    Raises:
        UserError: one is not a whole number, too small, or stands twice.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts):
        raise UserError(f"--lengths {quoted(text)}: write whole numbers with commas, such as 4096,8192")
    lengths = sorted(map(int, parts))
    if len(set(lengths)) != len(lengths):
        raise UserError(f"--lengths {quoted(text)}: one stands twice; remove it")
    if not LEAST_LENGTH <= lengths[0] <= lengths[-1] <= MOST_TOKENS:
        raise UserError(f"--lengths {quoted(text)}: give lengths from {LEAST_LENGTH} to {MOST_TOKENS:,}")
    return lengths
