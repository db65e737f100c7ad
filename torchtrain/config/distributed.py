"""How a step is spread over processes."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Section, SmallCount

# What `distributed.offload` needs of `distributed.zero_stage`.
LEAST_STAGE = {"none": 0, "optimizer": 1, "all": 3}


class DistributedConfig(Section):
    """How a step is spread over the processes that torchrun starts. No setting here changes what is computed.

    Processes / sequence_parallel groups each work on train.micro_batch rows at a time. The rest of
    train.sequences_per_step is gradient accumulation.
    """

    sequence_parallel: SmallCount = Field(
        default=1, description="processes that share a row (DeepSpeed Ulysses); divides the processes and the heads"
    )
    share: Literal["heads", "documents"] = Field(
        default="heads",
        description="how processes share a row. heads: tokens are exchanged for heads in every layer. "
        "documents: each takes whole documents and exchanges nothing, where they divide evenly",
    )
    zero_stage: Literal[0, 1, 2, 3] = Field(
        default=0,
        description="what DeepSpeed spreads over the processes: 1 optimizer state, 2 gradients too, 3 weights too",
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        default="none", description="keep in host memory: optimizer state, or with stage 3 all (weights too)"
    )

    @model_validator(mode="after")
    def _offload_has_a_stage(self) -> Self:
        needed = LEAST_STAGE[self.offload]
        if self.zero_stage < needed:
            raise ValueError(
                f"offload {self.offload!r} needs zero_stage {needed} or more, and zero_stage is {self.zero_stage}; "
                "change one"
            )
        return self
