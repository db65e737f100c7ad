"""The configuration of a study: strict, from YAML, with `key.sub=value` overrides.

Every experiment is a section: one that is left out, or `off`, is not run; an empty one has every default. All lengths
are in tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from anchorline import settings
from anchorline.errors import UserError
from jaxref.rounding import PRESETS
from ropestudy.compute.conditions import condition
from ropestudy.schema import Mode

# RoPE's float32 angles hold each whole number only up to 2^24. No row ends beyond it: its shift, its gap and its length
# are limited one by one.
MOST_SHIFT, MOST_GAP, MOST_TOKENS = 2**23, 2**22, 2**21

ModelName = Literal["pretrained", "shuffled", "kaiming", "kaiming_sqrt5", "normal_002"]
MaskName = Literal["full", "intra", "intra_reset", "anchor"]
Half = Literal["bf16", "fp16"]
SHORTEST = 4  # tokens of a sequence
Tokens = Annotated[int, Field(ge=SHORTEST, le=MOST_TOKENS)]
Shift = Annotated[int, Field(ge=0, le=MOST_SHIFT)]
Gap = Annotated[int, Field(ge=0, le=MOST_GAP)]
Count = Annotated[int, Field(ge=1, le=10_000)]


def _is_condition(name: str) -> str:
    condition(name)
    return name


def _is_half(name: str) -> str:
    known = [name for name, rounding in PRESETS.items() if rounding.q_rotated in get_args(Half)]
    if name not in known:
        raise ValueError(f"{name!r} is not a preset of half precision; choose from {', '.join(known)}")
    return name


ConditionName = Annotated[str, AfterValidator(_is_condition)]
HalfPreset = Annotated[str, AfterValidator(_is_half)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Strict):
    """What is studied."""

    source: str = Field(
        default="smollm2",
        description="smollm2, a folder with config.json and safetensors, or a hub id",
    )
    weights: Literal["bfloat16", "float16", "float32", "stored"] = Field(
        default="bfloat16",
        description="dtype every parameter is rounded to, once, in every condition: differences are then the "
        "arithmetic's",
    )
    cache: str = Field(default="cache", description="where the trainer's converted smollm2 is looked for")


class TextConfig(_Strict):
    """What it reads."""

    source: str = Field(
        default="demo",
        description="demo (addresses, factbook, standard library), or a .jsonl/.txt file or folder",
    )
    field: str = Field(default="text", description="of JSON records")
    bos: Literal["first", "none"] = Field(default="first", description="whether the model's BOS opens each sequence")
    tokens: Tokens | None = Field(
        default=None,
        description="that each document has, so that studies of other sections or lengths read the same ones, and "
        "their cells are one another's; null: as many as the longest row",
    )


class Contestant(_Strict):
    """A model and a condition of `conditions.CONDITIONS`: a preset of `jaxref.rounding`, or one with a change."""

    model: ModelName = "pretrained"
    condition: ConditionName


class _Experiment(_Strict):
    tokens: Tokens = Field(default=256, description="of a sequence")
    sequences: Count = 2


class RowPositions(_Strict):
    """The positions of a row: two shifts that are compared, and a gap in its middle."""

    d1: Shift = 0
    d2: Shift = 16
    gap: Gap = Field(
        default=0, description="added to the positions of the second half: its queries see keys this much farther away"
    )


class _Placed(_Experiment):
    positions: list[RowPositions] = Field(default=[RowPositions()], min_length=1, description="each is measured")


class ShiftPairsConfig(_Experiment):
    """D of many pairs of shifts: (d1, d2) for every d1, (0, d) for every one of them, and a grid."""

    contestants: list[Contestant] = Field(min_length=1)
    modes: list[Mode] = Field(default=["local", "propagated"], min_length=1)
    d1: list[Shift] = Field(default=[0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 18, 20, 22, 50, 100, 200, 500, 1000, 2000])
    d2: Shift = 16
    grid: list[Shift] = Field(default=[], description="all pairs of these shifts too")
    propagated_d1: list[Shift] | None = Field(default=None, description="fewer shifts for that mode; null is all of d1")
    propagated_sequences: Count | None = Field(default=None, description="fewer sequences; null is all")

    def all_shifts(self, mode: Mode) -> list[int]:
        """Return every shift of a mode, rising."""
        given = self.d1 if mode == "local" or self.propagated_d1 is None else self.propagated_d1
        return sorted({*given, self.d2, *(self.grid if mode == "local" else [])})

    def pairs(self, mode: Mode) -> list[tuple[int, int]]:
        """Return every pair of a mode once, smaller shift first, rising."""
        shifts = self.all_shifts(mode)
        pairs = {(d, self.d2) for d in shifts} | ({(0, d) for d in shifts} if 0 in shifts else set())
        if mode == "local":
            pairs |= {(a, b) for a in self.grid for b in self.grid}
        return sorted({(min(a, b), max(a, b)) for a, b in pairs if a != b})


class LengthsConfig(_Strict):
    """One pair of shifts at many lengths, and the error against float64 there."""

    contestants: list[Contestant] = Field(min_length=1)
    lengths: list[Tokens] = Field(default=[64, 128, 256, 512, 1024, 2048, 4096, 8192], min_length=1)
    sequences: Count = 2
    modes: list[Mode] = Field(default=["local"], min_length=1)
    d1: Shift = 0
    d2: Shift = 16


class FactorialConfig(_Placed):
    """Every rounding site alone, and every site left out."""

    format: Half = "bf16"
    off_from: list[HalfPreset] = Field(
        default=["hf_eager_bf16", "flash_bf16", "paper_bf16"],
        description="half precision presets a site is left out of",
    )


class RemediesConfig(_Placed):
    """What is done against it."""

    bases: list[HalfPreset] = Field(
        default=["hf_eager_bf16", "flash_bf16", "paper_bf16"], description="half precision presets"
    )
    only: list[str] | None = Field(default=None, description="of the remedies, by name; null is all")


class ControlsConfig(_Placed):
    """What must hold, or must not, if rounding is the cause."""

    base: HalfPreset = Field(default="hf_eager_bf16", description="a half precision preset")
    models: list[ModelName] = Field(default=list(get_args(ModelName)))
    model_conditions: list[ConditionName] = Field(default=["hf_eager_bf16"], description="conditions of every model")
    phases: Count = Field(default=2, description="draws of random phases")


class MasksConfig(_Placed):
    """Packed documents under every mask."""

    documents: Annotated[int, Field(ge=2, le=10_000)] = Field(default=4, description="in a row, of unequal lengths")
    conditions: list[ConditionName] = Field(
        default=["exact", "fp32", "hf_eager_bf16", "flash_bf16", "paper_bf16"], min_length=1
    )
    masks: list[MaskName] = Field(default=list(get_args(MaskName)), min_length=1)


class Placement(_Strict):
    """A row of an outcome: plain text or a copied key, and its positions."""

    task: Literal["text", "copy"] = "text"
    start: Shift = Field(default=0, description="position of the first token")
    gap: Gap = Field(default=0, description="added to the positions of the second half")


class OutcomesConfig(_Experiment):
    """What whole setups make of the outputs: loss, divergence from float64, whether a key is copied. No attention is
    compared, so rows are computed together and cost a tenth.
    """

    conditions: list[ConditionName] = Field(default=["hf_eager_bf16", "flash_bf16", "paper_bf16"], min_length=1)
    settings: list[Placement] = Field(default=[Placement()], min_length=1)


class DoseConfig(_Experiment):
    """How many bits RoPE needs: each dose at each site, in each setting."""

    sites: list[Literal["table", "q and k", "q and k before RoPE", "all of RoPE"]] = Field(
        default=["table", "q and k", "q and k before RoPE", "all of RoPE"], min_length=1
    )
    mantissa_bits: list[Annotated[int, Field(ge=1, le=23)]] = Field(
        default=[2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 23], min_length=1
    )
    settings: list[Placement] = Field(
        default=[Placement(task=task, gap=gap) for gap in (100, 1000, 8000) for task in ("text", "copy")], min_length=1
    )


class SitesConfig(_Experiment):
    """Every site alone, by what it does to the outputs."""

    format: Half = "bf16"
    settings: list[Placement] = Field(default=[Placement()], min_length=1)


class StudyConfig(_Strict):
    """A study."""

    title: str
    model: ModelConfig = ModelConfig()
    text: TextConfig = TextConfig()
    seed: int = Field(default=0, ge=0, lt=2**32, description="of random weights, phases and which documents are taken")
    block: int = Field(default=64, ge=1, le=MOST_TOKENS, description="queries at a time: what memory is made of")
    shift_pairs: ShiftPairsConfig | None = None
    lengths: LengthsConfig | None = None
    factorial: FactorialConfig | None = None
    remedies: RemediesConfig | None = None
    controls: ControlsConfig | None = None
    masks: MasksConfig | None = None
    setups: OutcomesConfig | None = None
    dose: DoseConfig | None = None
    sites: SitesConfig | None = None

    @property
    def experiments(self) -> dict[str, Any]:
        """The sections that are run, by name."""
        found = {name: getattr(self, name) for name in EXPERIMENTS}
        return {name: section for name, section in found.items() if section is not None}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if not self.experiments:
            raise UserError(f"no experiment; give one of {', '.join(EXPERIMENTS)}")
        most, given = max(map(longest, self.experiments.values())), self.text.tokens
        if given is not None and given < most:
            raise UserError(f"text.tokens {given}: the longest row has {most}; give {most} or more, or leave it out")
        if self.masks is not None:
            _check_documents(self.masks)
        return self


# In the order in which they are computed: what says most for its cost first, for a study may be read before its end.
EXPERIMENTS = (
    *("setups", "dose", "remedies", "lengths", "shift_pairs", "masks", "sites"),
    *("factorial", "controls"),
)


def longest(section: Any) -> int:
    """Return how many tokens the longest sequence of an experiment has."""
    return max(section.lengths) if isinstance(section, LengthsConfig) else section.tokens


def _check_documents(masks: MasksConfig) -> None:
    """`text.packed_row` gives document k the share k of the row after its BOS, and none may be empty."""
    needed = masks.documents * (masks.documents + 1) // 2 + 1
    if masks.tokens < needed:
        raise UserError(
            f"masks.documents: {masks.documents} documents of unequal lengths need {needed} tokens, and masks.tokens "
            f"is {masks.tokens}; give fewer documents or more tokens"
        )


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """Read a study from YAML, apply overrides such as `shift_pairs.tokens=128` and `lengths=off`, validate.

    Raises:
        UserError: see `anchorline.settings.load`.
    """
    return settings.load(StudyConfig, path, overrides, example="shift_pairs.tokens=128", prepare=_sections)


def _sections(tree: settings.Tree) -> settings.Tree:
    """`remedies:` with nothing under it is the experiment with every default; `remedies: off` takes it out."""
    return {key: {} if value is None else value for key, value in tree.items() if value is not False}
