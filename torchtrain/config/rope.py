"""RoPE for the new context length."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Count, Section, Stretch, Theta

# The base (rope_theta) the paper trains each length with (arXiv 2411.13476, section 5, table of RoPE bases).
PAPER_ROPE_THETA = {32_768: 1e6, 65_536: 5e6, 131_072: 1e7, 262_144: 5e7}

# What each type of transformers takes beside rope_theta and the original length.
ROPE_PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
}


class RopeConfig(Section):
    """How RoPE is set for the new context length (`pack.sequence_length`).

    `keep` keeps the model's own type and parameters. Another type replaces the model's, and the parameters that only
    the model's takes go with it. What the model's config.json says beside that stays, unless it is set here. Parameters
    that do not belong to the type are refused.
    """

    type: Literal["keep", "default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = Field(
        default="keep", description="RoPE scaling by transformers' name; ntk: a larger theta; keep: the model's own"
    )
    theta: Theta | Literal["keep", "paper"] = Field(
        default="keep", description="rope_theta: a number, the model's own, or the paper's for this length"
    )
    factor: Stretch | None = Field(default=None, description="scale; default: new length / original length")
    original_max_position_embeddings: Count | None = Field(
        default=None, description="positions of a linearly scaled model before scaling, if its config.json does not say"
    )
    attention_factor: Stretch | None = Field(
        default=None, description="yarn, longrope: factor on cos and sin; default: the model's, else the type's formula"
    )
    beta_fast: Stretch | None = Field(
        default=None, description="yarn: rotations from which a dimension is not scaled; default: the model's, else 32"
    )
    beta_slow: Stretch | None = Field(
        default=None,
        description="yarn: rotations up to which a dimension is scaled fully; default: the model's, else 1",
    )
    truncate: bool | None = Field(
        default=None,
        description="yarn: round the ends of the ramp between the two to whole dimensions; default: the "
        "model's, else true",
    )
    mscale: Stretch | None = Field(
        default=None,
        description="yarn: weight of the factor in attention_factor's formula, over that of mscale_all_dim; default: "
        "the model's",
    )
    mscale_all_dim: Stretch | None = Field(
        default=None, description="yarn: see mscale; DeepSeek's families scale the logits of attention by it, too"
    )
    low_freq_factor: Stretch | None = Field(
        default=None, description="llama3: bounds the wavelengths that are scaled fully; default: the model's"
    )
    high_freq_factor: Stretch | None = Field(
        default=None, description="llama3: bounds the wavelengths that are not scaled; default: the model's"
    )
    short_factor: list[Stretch] | None = Field(
        default=None,
        description="longrope: factor of each dimension for rows of the original length; default: the model's",
    )
    long_factor: list[Stretch] | None = Field(
        default=None, description="longrope: factor of each dimension for longer rows; default: the model's"
    )

    @model_validator(mode="after")
    def _parameters_fit_type(self) -> Self:
        takes = ROPE_PARAMETERS | {"keep": (), "ntk": ("factor",)}
        other = ("type", "theta", "original_max_position_embeddings", *takes[self.type])
        if stray := sorted(name for name, value in self if name not in other and value is not None):
            raise ValueError(f"rope type {self.type!r} does not take {', '.join(stray)}; remove it or change rope.type")
        return self
