"""The settings of `torchtrain bench`, read from YAML."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, model_validator

from anchorline import settings
from torchtrain.config import (
    MOST_TOKENS,
    DataConfig,
    Engine,
    ModelConfig,
    Section,
    SmallCount,
    TokenizerConfig,
    fill_empty_sections,
)

Tokens = Annotated[int, Field(ge=64, le=MOST_TOKENS)]
Lengths = Annotated[list[Tokens], Field(min_length=1, max_length=64)]
Dtype = Literal["float32", "bfloat16", "float16"]
Rival = Literal["flex, its own mask", "flex, mask kept", "BOS per document", "dense mask"]
Loop = Literal["torchtrain, anchor", "torchtrain, full", "transformers, full", "transformers, dense mask"]
RIVALS: list[Rival] = list(get_args(Rival))
LOOPS: list[Loop] = list(get_args(Loop))


class AttentionBench(Section):
    """What `bench attention` measures: calls of one shape, at several lengths."""

    lengths: Lengths = Field(default=[2048, 4096, 8192], description="tokens a row")
    rows: list[Literal["mean", "least"]] = Field(
        default=["mean", "least"],
        min_length=1,
        max_length=2,
        description="rows of the corpus: the one nearest to the mean of live pairs, or the one with the fewest",
    )
    dtypes: list[Dtype] = Field(default=["bfloat16"], min_length=1, max_length=3, description="of q, k and v")
    engines: list[Engine] = Field(
        default=list(get_args(Engine)),
        max_length=len(get_args(Engine)),
        description="engines of torchtrain; one that cannot run is listed with the reason",
    )
    windows: list[SmallCount] = Field(
        default=[], max_length=8, description="tokens that a query sees: each engine runs full attention within each"
    )
    rivals: list[Rival] = Field(default=RIVALS, max_length=4, description="alternatives to torchtrain")
    heads: SmallCount = Field(default=32, description="query heads")
    kv_heads: SmallCount = Field(default=8, description="key and value heads")
    head_dim: Annotated[int, Field(ge=8, le=512)] = Field(default=128, description="width of a head")
    dense_tokens: Tokens = Field(default=4096, description="tokens of the longest row for a T x T mask")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is no multiple of kv_heads {self.kv_heads}; change one of them")
        return self


class StepBench(Section):
    """What `bench step` measures: training steps of one row, in several loops."""

    model: ModelConfig = Field(description="the model to train")
    layers: SmallCount | None = Field(default=None, description="use only the first layers, this many; default: all")
    lengths: Lengths = Field(default=[1024, 2048, 4096], description="tokens a row")
    loops: list[Loop] = Field(default=LOOPS, min_length=1, max_length=4, description="loops that take turns")
    ceiling: Annotated[int, Field(ge=64, le=2**15)] = Field(
        default=2048, description="rows and columns of square matrices whose product gives the device's peak FLOP/s"
    )

    @model_validator(mode="after")
    def _every_weight_is_trained(self) -> Self:
        if self.model.lora is not None:
            raise ValueError("model.lora: all loops train every weight; set it to null")
        return self


class BenchConfig(Section):
    """All settings of `torchtrain bench`. Each of its two measurements has a section."""

    tokenizer: TokenizerConfig = Field(description="tokenizer of the documents")
    data: DataConfig = Field(description="the documents")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if there is a GPU")
    threads: SmallCount | None = Field(
        default=1, description="threads on a CPU; with 1, CPU time is measured instead of wall time"
    )
    repeats: Annotated[int, Field(ge=3, le=1000)] = Field(
        default=5, description="turns; in each turn every case runs once"
    )
    attention: AttentionBench = Field(default=AttentionBench(), description="what `bench attention` measures")
    step: StepBench | None = Field(default=None, description="what `bench step` measures")


def load_bench(path: str | Path, overrides: Sequence[str] = ()) -> BenchConfig:
    """Read a YAML file, apply `section.key=value` overrides, validate.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(BenchConfig, path, overrides, example="repeats=5", prepare=fill_empty_sections)
