"""The whole of a run: every section, and what must hold between them."""

from typing import Self

from pydantic import model_validator

from torchtrain.config.data import DataConfig
from torchtrain.config.distributed import DistributedConfig
from torchtrain.config.evaluation import EvaluationConfig, HeldOutConfig
from torchtrain.config.model import ModelConfig
from torchtrain.config.pack import PackConfig
from torchtrain.config.rope import PAPER_ROPE_THETA, RopeConfig
from torchtrain.config.run import LogConfig, RunConfig
from torchtrain.config.save import SaveConfig
from torchtrain.config.section import Section
from torchtrain.config.train import TrainConfig


class Config(Section):
    """The whole of a run."""

    run: RunConfig
    model: ModelConfig
    rope: RopeConfig = RopeConfig()
    data: DataConfig
    pack: PackConfig
    train: TrainConfig = TrainConfig()
    distributed: DistributedConfig = DistributedConfig()
    held_out: HeldOutConfig = HeldOutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    save: SaveConfig = SaveConfig()
    log: LogConfig = LogConfig()

    @model_validator(mode="after")
    def _paper_theta_is_known(self) -> Self:
        if self.rope.theta == "paper" and self.pack.sequence_length not in PAPER_ROPE_THETA:
            raise ValueError(
                f"rope.theta 'paper': the paper has no base for pack.sequence_length {self.pack.sequence_length}; "
                f"it has one for {', '.join(map(str, PAPER_ROPE_THETA))}: give a number"
            )
        return self

    @model_validator(mode="after")
    def _compiled_layers_are_whole(self) -> Self:
        model, others = self.model, ""
        if self.distributed.zero_stage == 3:
            others = "distributed.zero_stage 3, which gathers weights within a layer; set it to 2"
        elif model.layer_chunk is not None:
            others = "model.layer_chunk, which cuts a layer up; set that to null"
        elif model.activation_checkpointing == "offload":
            others = "model.activation_checkpointing offload, which runs a layer itself; set that to true"
        elif model.lora is not None:
            others = "model.lora, whose adapters are modules of their own within a layer; set that to null"
        if model.fused == "compile" and others:
            raise ValueError(f"model.fused compile: does not go with {others}, or model.fused to none")
        return self
