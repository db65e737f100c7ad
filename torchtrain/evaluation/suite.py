"""A suite: which tasks are measured, on how many samples, made of what. YAML in, a strict schema out."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from anchorline import settings
from anchorline.errors import UserError, quoted
from anchorline.files import check_no_pattern, expand
from torchtrain.config import MOST_TOKENS, Count, Name, PathText, Real, Section, Source

# RULER's tasks as they are now, in RULER's order, and the tokens a model may generate for each.
_NIAH = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
TASKS = {**{f"niah_{kind}": 128 for kind in _NIAH}, "vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
# Tasks that NVIDIA changed after the paper, as they were in October 2024, and the same tasks as they are now.
IN_2024 = {"vt_2024_10": "vt", "fwe_2024_10": "fwe"}
# The paper leaves out two tasks for LLaMA-2, which scores nothing on them.
ELEVEN = tuple(task for task in TASKS if task not in ("niah_multikey_3", "cwe"))
# LongBench's six groups (arXiv 2308.14508, table 1), by the names of the paper's table.
LONGBENCH: dict[str, tuple[str, ...]] = {
    "Code Completion": ("lcc", "repobench-p"),
    "ICL": ("trec", "triviaqa", "samsum", "lsht"),
    "Multi-Doc QA": ("hotpotqa", "2wikimqa", "musique", "dureader"),
    "Single-Doc QA": ("narrativeqa", "qasper", "multifieldqa_en", "multifieldqa_zh"),
    "Summarization": ("gov_report", "qmsum", "multi_news", "vcsum"),
    "Synthetic": ("passage_count", "passage_retrieval_en", "passage_retrieval_zh"),
}
# LongBench-E's parts by the words of a context, and the number of words at which each ends.
LONGBENCH_E_PARTS = {"0-4k": 4000, "4-8k": 8000, "8k+": None}
_LEAST_LENGTH = 64


def room_of(task: str) -> int:
    """Return how many tokens a model may generate for one of RULER's tasks."""
    return TASKS[IN_2024.get(task, task)]


def key_of(task: str, settings: dict[str, Any]) -> str | None:
    """Return which key of a setting by the start of tasks' names (`mmlu`) is a task's; None: none is."""
    return next((name for name in settings if task == name or task.startswith(f"{name}_")), None)


def is_ruler(task: str) -> bool:
    """Return whether a task is RULER's."""
    return task in TASKS or task in IN_2024


def benchmark_of(task: str) -> str:
    """Return `ruler`, `longbench`, `mmlu`, `perplexity`, or the name of any other task."""
    if is_ruler(task):
        return "ruler"
    return next((name for name in ("longbench", "mmlu") if task.startswith(f"{name}_")), task)


def longbench_e_part(task: str, sample: dict[str, Any]) -> str:
    """Return the part of LongBench-E that a sample belongs to; "" for a sample of another task."""
    if not (task.startswith("longbench_") and task.endswith("_e")):
        return ""
    return next(name for name, end in LONGBENCH_E_PARTS.items() if end is None or sample["length"] < end)


class Haystack(Source):
    """The text in which needles are hidden: a source as in data.sources. RULER's essays are `texts: ESSAYS/*.txt`."""

    sentences: Literal["english", "untrained"] = Field(
        default="english",
        description="how sentences are found: by NLTK's punkt_tab for English, as RULER does (its data must be on "
        "this machine), or by NLTK's Punkt without training, which needs no data",
    )

    @property
    def name(self) -> str:
        """The haystack's name in results."""
        kind = next(kind for kind in ("demo", "files", "texts", "dataset") if getattr(self, kind) is not None)
        return f"{kind} {getattr(self, kind)}, sentences {self.sentences}"


class KeyTokensConfig(Section):
    """Which tokens need a long context: LongPPL's key tokens (arXiv 2410.23771), with its thresholds."""

    judge: PathText | None = Field(
        default=None, description="model that tells them, with the same tokenizer; default: the one that is evaluated"
    )
    context: Count = Field(default=4096, description="tokens of the short context, at least")
    stride: Count = Field(default=1024, description="tokens whose short contexts begin at one place")
    gain: Real = Field(default=2.0, description="least loss, in nats, that the long context saves")
    most_loss: Real = Field(default=2.0, description="most loss, in nats, with the long context")


class PerplexityConfig(Section):
    """Perplexity on long documents, by position."""

    source: Source
    documents: Count = Field(default=8, description="the first so many documents that are long enough")
    key_tokens: KeyTokensConfig | None = Field(
        default=None, description="measure key tokens, too; null: positions alone"
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
    squad: PathText | None = Field(default=None, description="for qa_1: SQuAD 2.0's dev-v2.0.json")
    hotpotqa: PathText | None = Field(default=None, description="for qa_2: hotpot_dev_distractor_v1.json")
    data: dict[Name, PathText] = Field(
        default={},
        description="local data of lm-eval's tasks, by the start of their names: {mmlu: FOLDER}. The folder holds a "
        "data set as the hub has it",
    )
    include_path: PathText | None = Field(default=None, description="folder of further task files, as lm-eval takes it")
    perplexity: PerplexityConfig | None = None
    batch_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        default=16_384, description="tokens of prompts and answers whose keys and values are held at a time"
    )
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | dict[str, int | Name] | None = Field(
        default=None,
        description="lay the layers on several GPUs by accelerate (auto), or say which module "
        "goes where: {model.embed_tokens: 0, ...}; default: one device holds all",
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, description="default: as the weights are saved")


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite's YAML. Raises UserError: as `anchorline.settings.load`; or a named folder of data is not there."""
    suite = settings.load(Suite, path, overrides, example="samples=20")
    for name, folder in suite.data.items():
        if not expand(folder).is_dir():
            raise UserError(f"data.{name} {quoted(folder)}: there is no such folder; correct it or leave it out")
        check_no_pattern(f"data.{name} {quoted(folder)}", expand(folder))
    return suite


def parse_lengths(text: str) -> list[int]:
    """Return the lengths of `--lengths`, ascending. Raises UserError where one is not a whole number, or too small."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,8}", part) for part in parts):
        raise UserError(f"--lengths {quoted(text)}: write whole numbers with commas, such as 4096,8192")
    lengths = sorted({*map(int, parts)})
    if not _LEAST_LENGTH <= lengths[0] <= lengths[-1] <= MOST_TOKENS:
        raise UserError(f"--lengths {quoted(text)}: give lengths from {_LEAST_LENGTH} to {MOST_TOKENS:,}")
    return lengths
