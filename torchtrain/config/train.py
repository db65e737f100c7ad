"""The optimizer and its steps."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from anchorline.errors import UserError
from torchtrain.config.section import Beta, Count, CountOrZero, Real, Section, Share, SmallCount


class LossWeightConfig(Section):
    """Weights of targets by effective context: the tokens that a prediction sees, the anchor's and its own included.

    A target weighs 1, and in the tail more. Source: EXACT, arXiv 2605.10544.
    """

    tail: Count = Field(description="effective context, in tokens, from which targets weigh more")
    extra: Annotated[float, Field(ge=-1, le=1e6)] = Field(
        default=1.0, description="mean weight that a target of the tail has beyond 1; with even from -1 on"
    )
    share: Literal["inverse_frequency", "even"] = Field(
        default="inverse_frequency",
        description="how targets of the tail share it. inverse_frequency: each bucket, twice as far as the one before, "
        "gets as much. even: each target gets as much",
    )
    most: Real = Field(default=10.0, description="most weight beyond 1 that inverse_frequency gives")
    sample_rows: Count = Field(default=256, description="first training rows, in which frequencies are counted")
    shuffle: bool = Field(
        default=False, description="give the weights of a row to its targets at random, as a control experiment"
    )

    @model_validator(mode="after")
    def _is_a_weight(self) -> Self:
        if self.share == "inverse_frequency" and self.extra <= 0:
            raise ValueError(f"extra {self.extra:g}: inverse_frequency shares out more than 0; or set share to even")
        return self


class TrainConfig(Section):
    """The optimizer and its steps; by default the paper's AdamW."""

    steps: Count = Field(default=2000, description="optimizer steps of the run; epochs may say it instead")
    epochs: Annotated[float, Field(gt=0, le=1e4)] | None = Field(
        default=None, description="how often every row is taken, which gives the steps; the last one is filled up"
    )
    sequences_per_step: Count = Field(default=8, description="rows in one optimizer step (the global batch)")
    micro_batch: SmallCount = Field(default=1, description="rows in one forward; the rest is gradient accumulation")
    learning_rate: Real = Field(default=2e-5, description="AdamW's peak learning rate")
    schedule: Literal["constant", "cosine", "linear", "wsd"] = Field(
        default="constant",
        description="how the learning rate changes after the warm-up; wsd falls in the last `decay_steps`",
    )
    decay_steps: Count | None = Field(default=None, description="of wsd: steps in which the learning rate falls")
    decay: Literal["linear", "sqrt"] = Field(
        default="linear",
        description="of wsd: how it falls; sqrt: by the root of the share of `decay_steps` that is done",
    )
    warmup_steps: CountOrZero = Field(default=0, description="steps in which the learning rate rises to its peak")
    min_learning_rate_share: Share = Field(
        default=0.0, description="share of the learning rate at which cosine, linear and wsd end"
    )
    weight_decay: Annotated[float, Field(ge=0, le=1e30)] = Field(default=0.1, description="AdamW's weight decay")
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), strict=False, description="AdamW's decay rates of the two moments"
    )
    epsilon: Real = Field(default=1e-8, description="AdamW's epsilon")
    clip_norm: Real | None = Field(default=1.0, description="largest norm of the gradient; null: no clipping")
    loss_chunk: Count | None = Field(
        default=None,
        description="tokens whose logits exist at one time; null: 1,024 on a CPU, on a GPU as many as take "
        "half a GiB in float32",
    )
    loss_weight: LossWeightConfig | None = Field(
        default=None, description="weights of targets by effective context; null: all weigh 1"
    )
    deterministic: bool = Field(
        default=False,
        description="use deterministic algorithms on a GPU, so that a run resumes bit by bit; "
        "FlashAttention then takes more time and memory",
    )
    skip_bad_steps: CountOrZero = Field(default=0, description="number of bad steps that the run may leave out")
    loss_spike: Annotated[float, Field(gt=1, le=1e30)] | None = Field(
        default=None, description="a step is bad if its loss is more than this many times the mean of the last 16"
    )

    @model_validator(mode="before")
    @classmethod
    def _take_null_for_unknown_steps(cls, given: Any) -> Any:
        """With epochs, so that one override replaces a file's steps."""
        if isinstance(given, dict) and given.get("epochs") is not None and given.get("steps", 0) is None:
            return {name: value for name, value in given.items() if name != "steps"}
        return given

    @model_validator(mode="after")
    def _batches_divide(self) -> Self:
        if self.sequences_per_step % self.micro_batch:
            raise ValueError(
                f"sequences_per_step {self.sequences_per_step} is not a multiple of micro_batch {self.micro_batch}"
            )
        if self.epochs is not None and "steps" in self.model_fields_set:
            raise ValueError(f"steps {self.steps} and epochs {self.epochs:g} exclude each other; set one to null")
        if self.epochs is None and (fault := self._too_few(self.steps)):
            raise ValueError(fault)
        if self.schedule != "wsd":
            if self.decay_steps is not None or self.decay != "linear":
                name = "decay" if self.decay_steps is None else "decay_steps"
                raise ValueError(f"{name} belongs to schedule: wsd, and schedule is {self.schedule}")
        elif self.decay_steps is None:
            raise ValueError("schedule wsd needs decay_steps, the number of last steps in which the rate falls")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_unknown_steps(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With epochs the steps follow from the rows; a config does not hold both."""
        return {name: value for name, value in dump(self).items() if self.epochs is None or name != "steps"}

    def _too_few(self, steps: int) -> str:
        if self.warmup_steps > steps:
            return f"warmup_steps {self.warmup_steps} is more than steps {steps}"
        if self.warmup_steps + (self.decay_steps or 0) > steps:
            return f"warmup_steps {self.warmup_steps} and decay_steps {self.decay_steps} are more than steps {steps}"
        return ""

    def with_steps(self, steps: int) -> Self:
        """Return the settings with the steps of `epochs`. Raises UserError: they are fewer than the schedule needs."""
        if fault := self._too_few(steps):
            raise UserError(f"train.epochs {self.epochs}: {fault}; lower these, or raise it")
        return self.model_copy(update={"steps": steps})
