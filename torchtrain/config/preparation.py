"""All settings of `torchtrain prepare`."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.data import DataConfig
from torchtrain.config.section import Name, PathText, Section, SmallCount


class SlurmConfig(Section):
    """What `prepare.executor: slurm` requests from the cluster."""

    environment: Name | None = Field(default=None, description="shell command that activates Python's environment")
    sbatch: dict[Name, Name] = Field(
        default={}, description="options of sbatch, such as partition and qos; default of time (for one task): 24:00:00"
    )


class PrepareConfig(Section):
    """How the work of `torchtrain prepare` is spread. These settings do not change the store."""

    executor: Literal["local", "slurm", "ray"] = Field(default="local", description="where tasks run")
    workers: SmallCount | None = Field(
        default=None, description="tasks that run at a time; default: one per core; with Slurm or Ray all"
    )
    memory: Annotated[int, Field(ge=1, le=2**16)] = Field(default=2, description="GiB of each task with Slurm or Ray")
    slurm: SlurmConfig = SlurmConfig()


class TokenizerConfig(Section):
    """The tokenizer."""

    source: PathText = Field(description="`smollm2`, a folder, or a hub id")
    trust_remote_code: bool = Field(default=False, description="run the tokenizer's own code")


class Preparation(Section):
    """All settings of `torchtrain prepare`."""

    tokenizer: TokenizerConfig
    data: DataConfig
    prepare: PrepareConfig = PrepareConfig()

    @model_validator(mode="after")
    def _has_sources(self) -> Self:
        if not self.data.sources:
            raise ValueError("data.sources: there is nothing to prepare; give sources")
        return self
