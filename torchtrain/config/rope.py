"""RoPE for the new context length."""

from typing import Literal, Self

from pydantic import Field, model_validator

from torchtrain.config.section import Count, Section, Stretch, Theta

# The base (rope_theta) the paper trains each length with (arXiv 2411.13476, section 5, table of RoPE bases).
PAPER_ROPE_THETA = {32_768: 1e6, 65_536: 5e6, 131_072: 1e7, 262_144: 5e7}


class RopeConfig(Section):
    """How RoPE is set for the new context length (`pack.sequence_length`).

    `keep` keeps the model's own type and parameters. Any other type replaces them. Parameters that do not belong to the
    type are refused.
    """

    type: Literal["keep", "default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = Field(
        default="keep",
        description="RoPE scaling by transformers' name; ntk: a larger theta; keep: the model's own",
    )
    theta: Theta | Literal["keep", "paper"] = Field(
        default="keep", description="rope_theta: a number, the model's own, or the paper's for this context length"
    )
    factor: Stretch | None = Field(default=None, description="scale; default: new length / original length")
    original_max_position_embeddings: Count | None = Field(
        default=None,
        description="positions of a model with linear scaling before that scaling; needed if its config.json does not "
        "say",
    )
    attention_factor: Stretch | None = Field(
        default=None, description="yarn, longrope: factor on cos and sin; default: the type's formula"
    )
    beta_fast: Stretch | None = Field(
        default=None, description="yarn: rotations from which a dimension is not scaled; default: 32"
    )
    beta_slow: Stretch | None = Field(
        default=None, description="yarn: rotations up to which a dimension is scaled fully; default: 1"
    )
    low_freq_factor: Stretch | None = Field(
        default=None, description="llama3: bounds the wavelengths that are scaled fully"
    )
    high_freq_factor: Stretch | None = Field(
        default=None, description="llama3: bounds the wavelengths that are not scaled"
    )
    short_factor: list[Stretch] | None = Field(
        default=None, description="longrope: factor of each dimension for rows of the original length"
    )
    long_factor: list[Stretch] | None = Field(
        default=None, description="longrope: factor of each dimension for longer rows"
    )

    @model_validator(mode="after")
    def _parameters_fit_type(self) -> Self:
        takes = {
            "keep": set(),
            "default": set(),
            "linear": {"factor"},
            "ntk": {"factor"},
            "dynamic": {"factor"},
            "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow"},
            "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
            "longrope": {"factor", "attention_factor", "short_factor", "long_factor"},
        }[self.type]
        needs = {"llama3": {"low_freq_factor", "high_freq_factor"}, "longrope": {"short_factor", "long_factor"}}
        other = ("type", "theta", "original_max_position_embeddings")
        given = {name for name, value in self if name not in other and value is not None}
        if stray := sorted(given - takes):
            raise ValueError(f"rope type {self.type!r} does not take {', '.join(stray)}; remove it or change rope.type")
        if missing := sorted(needs.get(self.type, set()) - given):
            raise ValueError(f"rope type {self.type!r} needs {', '.join(missing)}")
        ordered = {  # defaults are those of transformers
            "yarn": {"beta_fast": self.beta_fast or 32, "beta_slow": self.beta_slow or 1},
            "llama3": {"high_freq_factor": self.high_freq_factor or 0, "low_freq_factor": self.low_freq_factor or 0},
        }
        if self.type in ordered:
            (upper, high), (lower, low) = ordered[self.type].items()
            if high <= low:
                raise ValueError(f"{upper} {high} must be above {lower} {low}")
        return self
