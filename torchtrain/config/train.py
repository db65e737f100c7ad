"""The optimisation."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Beta, Count, CountOrZero, Real, Section, Share, SmallCount


class TrainConfig(Section):
    """The optimisation: the paper's AdamW unless told otherwise."""

    steps: Count = 2000
    sequences_per_step: Count = Field(default=8, description="rows in one optimizer step (the global batch)")
    micro_batch: SmallCount = Field(default=1, description="rows in one forward; the rest is gradient accumulation")
    learning_rate: Real = 2e-5
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: CountOrZero = 0
    min_learning_rate_share: Share = Field(default=0.0, description="where cosine and linear end, as a share")
    weight_decay: Annotated[float, Field(ge=0, le=1e30)] = 0.1
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), strict=False)
    epsilon: Real = 1e-8
    clip_norm: Real | None = 1.0
    loss_chunk: Count = Field(default=1024, description="tokens whose logits exist at one time")
    deterministic: bool = Field(
        default=False,
        description="add up in one order on a GPU, too, so that a run repeats and resumes with the same bits; costs "
        "time and memory of FlashAttention's backward pass",
    )
    skip_bad_steps: CountOrZero = Field(
        default=0,
        description="steps of the run that may be left out because loss or gradient is not finite (or a spike)",
    )
    loss_spike: Annotated[float, Field(gt=1, le=1e30)] | None = Field(
        default=None, description="a step is bad, too, whose loss is above this many times the mean of the 16 before it"
    )

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.sequences_per_step % self.micro_batch:
            raise ValueError(
                f"sequences_per_step {self.sequences_per_step} is not a multiple of micro_batch {self.micro_batch}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(f"warmup_steps {self.warmup_steps} is more than steps {self.steps}")
        return self
