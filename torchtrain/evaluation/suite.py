"""A suite: which tasks, how many samples, of which materials. YAML in, a strict schema out."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from anchorline import settings
from anchorline.errors import UserError, quoted
from torchtrain.config import MOST_TOKENS, Count, Name, PathText, Section, Source

EXAMPLE = "samples=20"  # of an override, for messages

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
LEAST_LENGTH = 512  # tokens: below, the questions alone take most of the room
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
    squad: PathText | None = Field(default=None, description="SQuAD 2.0's dev-v2.0.json")
    hotpotqa: PathText | None = Field(default=None, description="HotpotQA's hotpot_dev_distractor_v1.json")
    perplexity: PerplexityConfig | None = None
    batch_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Field(
        default=16_384, description="tokens of prompts and answers whose keys and values are held at a time"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(default=None, description="default: as the weights are saved")

    @model_validator(mode="after")
    def _tasks_are_known(self) -> Self:
        for name in self.tasks:
            if name not in TASKS:
                near = difflib.get_close_matches(name[:100], TASKS, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(TASKS)}"
                raise ValueError(f"task {name[:100]!r} is not one of RULER's; {hint}")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError("tasks: one stands twice; remove it")
        if {"vt", "vt_2024_10"} <= set(self.tasks):
            raise ValueError("tasks: vt and vt_2024_10 are the same task at two times; an average takes one")
        return self


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite's YAML.

    Raises:
        UserError: as `anchorline.settings.load`.
    """
    return settings.load(Suite, path, overrides, example=EXAMPLE)


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
