"""What a gate compares: cases, and the YAML that multiplies out to them.

    title: CI
    seeds: [0]
    matrix:
      - model: [llama, qwen3]
        dtype: [float32, bfloat16]
        stages: [forward, loss]

Every value of an entry may be a list: the entry is the product of its lists. What is left out has `CaseSpec`'s default.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator, model_validator

from anchorline import settings
from anchorline.errors import UserError
from parity_tests.report.schema import Group
from torchtrain.config import Engine, PackConfig

Dtype = Literal["float32", "bfloat16", "float16"]
Tokens = Annotated[int, Field(ge=32, le=2**24)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]

STAGES: tuple[Group, ...] = get_args(Group)
# Float32 holds every whole number below this, and RoPE takes positions in float32.
_POSITIONS = 2**24
MOST_CASES = 10_000
STEPS, RUN_STEPS = 20, 5  # of a trajectory, and of a whole run: more than two epochs
_STAGES = "what is compared: forward, loss, gradients, step, trajectory, run"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class CaseSpec(_Strict):
    """One cell: one model under one variant, RoPE type, engine and dtype, on two packed rows."""

    model: str = Field(
        default="llama",
        description="llama, mistral, qwen2, qwen3, tied, wide_heads, many_words, loaded, windows, capped, sinks, "
        "scaled, partial (tiny, random); smollm2; a folder; or a hub id",
    )
    variant: str = Field(default="anchor", description="full, intra, intra_reset, anchor; with +tag, +interleave")
    rope: Literal["keep", "default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope"] = Field(
        default="keep", description="keep is the model's own"
    )
    rope_parameters: Literal["usual", "all"] = Field(
        default="usual", description="all: theta and every parameter of the type away from its default"
    )
    rope_before: Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"] = Field(
        default="default", description="by which the model was extended once before"
    )
    engine: Engine = Field(default="sdpa", description="the attention engine that is judged")
    dtype: Dtype = Field(default="float32", description="of weights and activations")
    rotation: Literal["model", "float32"] = Field(
        default="model", description="float32: RoPE rotates q and k in it (model.rotation)"
    )
    tokens: Tokens = Field(default=53, description="of a row; a multiple of no block by default")
    position_offset: int = Field(default=0, ge=0, le=2**24, description="added to every position")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant", description="of the learning rate in step and trajectory"
    )
    warmup_steps: int = Field(default=0, ge=0, le=STEPS, description=f"of the {STEPS} steps of a trajectory")
    infinite_step: int = Field(default=0, ge=0, le=STEPS, description="whose gradient is infinite, from 1; 0: none")
    ranks: int = Field(default=1, ge=1, le=8, description="that share a step, each with rows of its own")
    repeats: int = Field(default=1, ge=1, le=1024, description="how often a step takes the rows; a power of two")
    documents: int = Field(default=5, ge=2, le=10_000, description="of a row; the second has one less, and padding")
    anchor_tokens: int = Field(default=2, ge=0, le=16, description="that open a row")
    padding: Literal["end", "inside"] = Field(
        default="end", description="inside: between and within documents of each row, too"
    )
    answers: bool = Field(default=False, description="some tokens are no targets, as in conversations")
    weights: bool = Field(default=False, description="targets weigh by their effective context")
    beyond_window: Literal["nothing", "anchor"] = Field(
        default="nothing", description="what layers with a sliding window see beyond it"
    )
    seed: Seed = Field(default=0, description="of random weights, tokens and the interleaving")
    stages: tuple[Group, ...] = Field(default=("forward",), min_length=1, description=_STAGES)
    against: str | None = Field(default=None, description="the model whose config and weights the oracle takes instead")

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        PackConfig(sequence_length=2, variant=self.variant)  # says what is wrong with a variant
        if self.position_offset + self.tokens > _POSITIONS:
            raise UserError(f"position_offset {self.position_offset}: positions stay below {_POSITIONS}")
        if self.tokens < self.anchor_tokens + 4 * self.documents:
            raise UserError(f"documents {self.documents}: give 4 tokens for each; the row has {self.tokens}")
        if "run" in self.stages and (self.ranks > 1 or not self.anchor_tokens or self.rope in ("default", "dynamic")):
            raise UserError("stages run: takes one rank, an anchor, and a rope that stretches or is kept")
        if self.weights and self.is_run:
            raise UserError("weights: a run has none in the gate; leave the stage run out")
        if self.answers and (self.is_run and "+" in self.variant):
            raise UserError(f"answers: a run of {self.variant} is none of the gate's; leave the extras out")
        if self.repeats & (self.repeats - 1) or (self.repeats > 1 and self.is_run):
            raise UserError(f"repeats {self.repeats}: give a power of two, and no stage run")
        if self.rotation == "float32" and (self.dtype == "float32" or self.engine == "dense" or self.is_run):
            raise UserError(
                "rotation float32: give bfloat16 or float16, an engine other than dense, and leave out the stage run"
            )
        if self.infinite_step > (STEPS if "trajectory" in self.stages else RUN_STEPS if self.is_run else 0):
            raise UserError(
                f"infinite_step {self.infinite_step}: the stages {', '.join(self.stages)} have no such step"
            )
        return self

    @field_validator("stages", mode="before")
    @classmethod
    def _split(cls, stages: Any) -> Any:
        return stages.split(",") if isinstance(stages, str) else stages

    @field_validator("stages")
    @classmethod
    def _in_order(cls, stages: tuple[Group, ...]) -> tuple[Group, ...]:
        return tuple(stage for stage in STAGES if stage in stages)

    @property
    def id(self) -> str:
        """The case's name in every report; fit for a file name."""
        model = self.model if self.against in (None, self.model) else f"{self.model}+against+{self.against}"
        rope = "+".join([self.rope, *["all"] * (self.rope_parameters == "all")])
        rope += f"+after+{self.rope_before}" * (self.rope_before != "default")
        parts = [model, self.variant, rope, self.engine, self.dtype, f"t{self.tokens}"]
        parts += [f"o{self.position_offset}"] * bool(self.position_offset)
        parts += [self.schedule] * (self.schedule != "constant") + [f"w{self.warmup_steps}"] * bool(self.warmup_steps)
        parts += [f"infinite{self.infinite_step}"] * bool(self.infinite_step)
        parts += ["rotation32"] * (self.rotation == "float32") + [f"x{self.repeats}"] * (self.repeats > 1)
        parts += [f"r{self.ranks}"] * (self.ranks > 1) + [f"d{self.documents}"] * (self.documents != 5)
        parts += [f"a{self.anchor_tokens}"] * (self.anchor_tokens != 2) + ["inside"] * (self.padding == "inside")
        parts += ["answers"] * self.answers + ["weights"] * self.weights
        parts += ["sees_anchor"] * (self.beyond_window == "anchor") + [*["run"] * self.is_run, f"s{self.seed}"]
        return "-".join(re.sub(r"[^\w.+]", "_", part) for part in parts)

    @property
    def shared(self) -> "CaseSpec":
        """The case without what the oracle does not depend on: cases that have this in common share its work."""
        same = {name: CaseSpec.model_fields[name].default for name in _UNSEEN_BY_ORACLE}
        model, stages = self.against or self.model, ("run",) if self.is_run else ("forward",)
        return self.model_copy(update=same | {"model": model, "stages": stages, "against": None})

    @property
    def is_run(self) -> bool:
        """Whether a whole run is asked for."""
        return "run" in self.stages

    @property
    def given(self) -> dict[str, str]:
        """What describes the case in a report: what every case says of itself, and what is not the default."""
        fields = {name: getattr(self, name) for name in CaseSpec.model_fields if name != "stages"}
        said = {n: x for n, x in fields.items() if n in _SAID or x != CaseSpec.model_fields[n].default}
        return {name: str(value) for name, value in said.items()} | {"stages": ",".join(self.stages)}

    @property
    def command(self) -> str:
        """What to type to run this case alone."""
        return shlex.join(["parity", "run", *(f"{name}={value}" for name, value in self.given.items())])


_UNSEEN_BY_ORACLE = ("engine", "rotation", "schedule", "warmup_steps", "infinite_step", "ranks", "repeats")
_SAID = ("model", "variant", "rope", "engine", "dtype", "tokens", "seed")


class Single(CaseSpec):
    """What `parity run key=value` takes: one case, with other defaults where someone tries a model."""

    engine: Engine | Literal["auto"] = Field(default="auto", description="auto: the fastest here")  # type: ignore[assignment]
    dtype: Dtype = Field(default="bfloat16", description="of weights and activations")
    tokens: Tokens = Field(default=192, description="of a row")
    against_dtype: Dtype = Field(default="float32", description="of the model `against`, which is judged, too")


# Each field of a case as a list. An entry's stages are one list, and its seeds are the gate's.
_LISTS: dict[str, Any] = {
    name: (
        list[Annotated[field.annotation, field.description, *field.metadata]],
        Field(default=[field.default], min_length=1, description=field.description),
    )
    for name, field in CaseSpec.model_fields.items()
    if name not in ("seed", "stages", "against")
}


class Entry(create_model("_Entry", __base__=_Strict, **_LISTS)):
    """Lists that multiply out to cases. A single value may stand for a list of one."""

    stages: tuple[Group, ...] = Field(default=("forward",), min_length=1, description=_STAGES)

    @field_validator("*", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return value if isinstance(value, list | tuple) else [value]

    @property
    def count(self) -> int:
        """How many cases a seed has."""
        return prod(len(getattr(self, name)) for name in _LISTS)

    def cases(self, seed: int) -> Iterator[CaseSpec]:
        """The product, the first field turning slowest."""
        for values in product(*(getattr(self, name) for name in _LISTS)):
            yield CaseSpec(**dict(zip(_LISTS, values, strict=True)), seed=seed, stages=self.stages)


class Gate(_Strict):
    """A gate: every entry of the matrix under every seed, then the cases that are written out."""

    title: str = Field(description="of the report")
    seeds: list[Seed] = Field(default=[0], min_length=1, description="each runs the whole matrix")
    matrix: list[Entry] = Field(default=[], description="entries; each multiplies out to cases")
    cases: list[CaseSpec] = Field(default=[], description="cases that are written out one by one")

    @model_validator(mode="after")
    def _cases_are_distinct(self) -> Self:
        count = len(self.seeds) * sum(entry.count for entry in self.matrix) + len(self.cases)
        if count > MOST_CASES:
            raise UserError(f"{count:,} cases; give at most {MOST_CASES:,}, in several gates")
        specs = expand(self)
        if not specs:
            raise UserError("no case; give `matrix` an entry, or `cases`")
        seen: set[str] = set()
        for spec in specs:
            if spec.id in seen:
                raise UserError(f"case {spec.id} is asked for twice; remove one")
            seen.add(spec.id)
        return self


def expand(config: Gate) -> list[CaseSpec]:
    """Every case, in the order of the file."""
    return [case for seed in config.seeds for entry in config.matrix for case in entry.cases(seed)] + list(config.cases)


def load_gate(path: str | Path, overrides: Sequence[str] = ()) -> Gate:
    """Read a gate from YAML, apply overrides such as `seeds=[1,2]` and `matrix.0.dtype=float32`, validate. Raises
    UserError: see `anchorline.settings.load`; or a case is asked for twice.
    """
    return settings.load(Gate, path, overrides, example="seeds=[1,2]")


def load_single(given: Sequence[str]) -> Single:
    """Read `model=smollm2 dtype=float32`. Raises UserError."""
    return settings.load(Single, None, given, example="model=smollm2")
