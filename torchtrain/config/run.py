"""Where a run lives, and who is told of it."""

from pydantic import Field

from torchtrain.config.section import Name, PathText, Section


class RunConfig(Section):
    """Where a run lives and what makes it repeatable."""

    folder: PathText = Field(description="the run's folder; everything the run writes stands in it")
    seed: int = Field(default=0, ge=0, lt=2**32, description="seeds the packing, the shuffling and torch")


class LogConfig(Section):
    """Who else is told what `metrics.jsonl` holds. Their packages must be installed."""

    tensorboard: bool = Field(default=False, description="write TensorBoard's events into the run's folder")
    wandb: Name | None = Field(default=None, description="send to this project of Weights & Biases")
