"""What a run writes to the disk: checkpoints to go on from and models, by `save`.

A checkpoint holds `STATE_BYTES` a weight that is trained: float32 masters and AdamW's two moments. As many are in host
memory, of all processes together, while one is written beside the steps.
"""

from dataclasses import dataclass

from torchtrain.config import SaveConfig, TrainConfig

STATE_BYTES = 12


@dataclass(frozen=True)
class Saves:
    """What a run writes, in bytes.

    Args:
        checkpoints: how many it makes.
        checkpoint: bytes of one.
        models: how many it exports.
        model: bytes of one.
        keep: `save.keep`.
    """

    checkpoints: int
    checkpoint: int
    models: int
    model: int
    keep: int

    @property
    def written(self) -> int:
        """All that is written over the run."""
        return self.checkpoints * self.checkpoint + self.models * self.model

    @property
    def most(self) -> int:
        """What is on the disk at one time: an old checkpoint goes once the new one is whole."""
        return min(self.checkpoints, self.keep + 1) * self.checkpoint + self.models * self.model


def count_saves(save: SaveConfig, train: TrainConfig, weights: int, trained: int, bytes_each: int) -> Saves:
    """Count what a run of a model with `weights` parameters of `bytes_each` writes, `trained` of which it trains."""
    checkpoints = sum(map(len, save.schedule(train.steps)))
    return Saves(
        checkpoints=checkpoints,
        checkpoint=STATE_BYTES * trained,
        models=min(save.last, max(checkpoints, 1)),
        model=bytes_each * weights,
        keep=save.keep,
    )


def describe_schedule(save: SaveConfig, train: TrainConfig) -> str:
    """Return, in words, at which steps a run saves."""
    parts = [_describe(steps) for steps in save.schedule(train.steps) if steps]
    return f"after step {', then '.join(parts)}" if parts else "never"


def _describe(steps: range) -> str:
    if len(steps) <= 3:
        return ", ".join(f"{step:,}" for step in steps)
    return f"{steps[0]:,}, {steps[1]:,} ... {steps[-1]:,}"
