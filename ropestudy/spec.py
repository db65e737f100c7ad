"""The settings of a study, read from YAML. Each experiment is a section; a section that is left out is not run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from anchorline import settings
from anchorline.errors import UserError
from ropestudy.compute.conditions import DOSES, condition
from ropestudy.schema import Mode, Opening

# RoPE's float32 angles hold each whole number only up to 2^24. A shift, a gap and a length together stay below it.
MOST_SHIFT, MOST_GAP, MOST_TOKENS = 2**23, 2**22, 2**21
D1, D2 = 0, 16  # the paper's two shifts

ModelName = Literal["pretrained", "shuffled", "kaiming", "kaiming_sqrt5", "normal_002"]
Bf16Preset = Literal["hf_eager_bf16", "flash_bf16", "paper_bf16"]
BF16_PRESETS: list[Bf16Preset] = list(get_args(Bf16Preset))
Tokens = Annotated[int, Field(ge=4, le=MOST_TOKENS)]
Shift = Annotated[int, Field(ge=0, le=MOST_SHIFT)]
Gap = Annotated[int, Field(ge=0, le=MOST_GAP)]
Count = Annotated[int, Field(ge=1, le=10_000)]
ConditionName = Annotated[str, AfterValidator(lambda name: condition(name).name)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(_Strict):
    """The model that is studied. Its parameters are rounded to bfloat16 once, under every condition."""

    source: str = Field(
        default="smollm2", description="smollm2, a folder with config.json and safetensors, or a hub id"
    )


class TextConfig(_Strict):
    """The text that the model reads. The tokenizer's BOS, if it has one, opens each row."""

    source: str = Field(
        default="demo", description="demo (addresses, factbook, standard library), or a .jsonl/.txt file or folder"
    )
    field: str = Field(default="text", description="the field of JSON records that holds the text")
    tokens: Tokens | None = Field(
        default=None,
        description="tokens that each document must have; studies with the same number read the same documents; "
        "null: as many as the longest row",
    )


class Contestant(_Strict):
    """A model and a condition."""

    model: ModelName = Field(default="pretrained", description="pretrained, shuffled, or an initialisation")
    condition: ConditionName = Field(description="a name of `conditions.CONDITIONS`")


class RowPositions(_Strict):
    """The positions of a row: two shifts that are compared, and a gap in its middle."""

    d1: Shift = Field(default=D1, description="the first shift")
    d2: Shift = Field(default=D2, description="the second shift")
    gap: Gap = Field(
        default=0, description="added to the positions of the second half: its queries see keys this much farther away"
    )


class Placement(_Strict):
    """What a row holds, and its positions."""

    task: Literal["text", "copy"] = Field(default="text", description="plain text, or a key that is copied")
    start: Shift = Field(default=0, description="position of the first token")
    gap: Gap = Field(default=0, description="added to the positions of the second half")


class Experiment(_Strict):
    """What all sections of experiments have."""

    sequences: Count = Field(default=2, description="rows, each from a document of its own")

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        raise NotImplementedError


class _OneLength(Experiment):
    tokens: Tokens = Field(default=256, description="tokens of a row")

    @property
    def longest(self) -> int:
        return self.tokens


class _Placed(_OneLength):
    positions: list[RowPositions] = Field(default=[RowPositions()], min_length=1, description="each is measured")


class _OutputsAlone(_OneLength):
    settings: list[Placement] = Field(default=[Placement()], min_length=1, description="each is measured")


class OutcomesConfig(_OutputsAlone):
    """What whole setups do to the outputs: loss, divergence from float64, whether a key is copied."""

    conditions: list[ConditionName] = Field(
        default=[*BF16_PRESETS], min_length=1, description="names of `conditions.CONDITIONS`"
    )


class DoseConfig(_OutputsAlone):
    """How many bits RoPE needs: each number of bits at each site of `conditions.DOSES`, in each setting."""

    mantissa_bits: list[Annotated[int, Field(ge=1, le=23)]] = Field(
        default=[2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 23], min_length=1, description="bits that are kept"
    )
    settings: list[Placement] = Field(
        default=[Placement(task=task, gap=gap) for gap in (100, 1000, 8000) for task in ("text", "copy")],
        min_length=1,
        description="each is measured",
    )


class RemediesConfig(_Placed):
    """What people do against the rounding of RoPE."""

    bases: list[Bf16Preset] = Field(default=BF16_PRESETS, description="presets that are remedied")
    only: list[str] | None = Field(default=None, description="names of the remedies; null: all")


class LengthsConfig(Experiment):
    """The paper's two shifts at many lengths, and the error against float64 there."""

    contestants: list[Contestant] = Field(min_length=1, description="what is compared")
    lengths: list[Tokens] = Field(min_length=1, description="tokens of a row")
    modes: list[Mode] = Field(default=["local"], min_length=1, description="see `schema.Mode`")

    @property
    def longest(self) -> int:
        """The longest of the lengths."""
        return max(self.lengths)


class ShiftPairsConfig(_OneLength):
    """D of many pairs of shifts: (d1, 16) for every d1, (0, d) for every one of these, and a grid."""

    contestants: list[Contestant] = Field(min_length=1, description="what is compared")
    d1: list[Shift] = Field(
        default=[0, 2, 4, 6, 8, 10, 12, 14, 15, 17, 18, 20, 22, 50, 100, 200, 500, 1000, 2000],
        description="shifts that are compared with 16",
    )
    grid: list[Shift] = Field(default=[], description="all pairs of these shifts too")
    propagated_d1: list[Shift] | None = Field(default=None, description="fewer shifts for that mode; null is all of d1")
    propagated_sequences: Count | None = Field(default=None, description="fewer sequences; null is all")

    def all_shifts(self, mode: Mode) -> list[int]:
        """Return every shift of a mode, rising."""
        given = self.d1 if mode == "local" or self.propagated_d1 is None else self.propagated_d1
        return sorted({*given, D2, *(self.grid if mode == "local" else [])})

    def pairs(self, mode: Mode) -> list[tuple[int, int]]:
        """Return every pair of a mode once, smaller shift first, rising."""
        shifts = self.all_shifts(mode)
        pairs = {(d, D2) for d in shifts} | ({(0, d) for d in shifts} if 0 in shifts else set())
        if mode == "local":
            pairs |= {(a, b) for a in self.grid for b in self.grid}
        return sorted({(min(a, b), max(a, b)) for a, b in pairs if a != b})


class MasksConfig(_Placed):
    """Packed documents under every mask."""

    documents: Annotated[int, Field(ge=2, le=10_000)] = Field(default=4, description="in a row, of unequal lengths")
    conditions: list[ConditionName] = Field(
        default=["exact", "fp32", *BF16_PRESETS], min_length=1, description="names of `conditions.CONDITIONS`"
    )

    @model_validator(mode="after")
    def _documents_have_tokens(self) -> Self:
        """`text.packed_row` gives document k the share k of the row after its BOS, and none may be empty."""
        needed = self.documents * (self.documents + 1) // 2 + 1
        if self.tokens < needed:
            raise UserError(
                f"documents: {self.documents} documents of unequal lengths need {needed} tokens, and tokens is "
                f"{self.tokens}; give fewer documents or more tokens"
            )
        return self


class DocumentPlaces(_Strict):
    """What stands before a document, and where the row begins."""

    lengths: list[Tokens] = Field(min_length=1, description="tokens of the document")
    opening: Opening = Field(default="bos", description="a BOS, a BOS as an anchor farther away, or nothing")
    gap: Gap = Field(default=0, description="positions between the anchor and the document")
    starts: list[Shift] = Field(min_length=1, description="positions of the row's first token")


class PlacesConfig(Experiment):
    """The error of one document at several places, each against float64."""

    places: list[DocumentPlaces] = Field(min_length=1, description="each is measured")
    conditions: list[ConditionName] = Field(
        default=[*BF16_PRESETS], min_length=1, description="names of `conditions.CONDITIONS`"
    )

    @property
    def longest(self) -> int:
        """The longest document."""
        return max(tokens for place in self.places for tokens in place.lengths)


class SitesConfig(_OutputsAlone):
    """Every site alone, by what it does to the outputs."""


class FactorialConfig(_Placed):
    """Every rounding site alone, and every site left out of a preset."""

    off_from: list[Bf16Preset] = Field(default=BF16_PRESETS, description="presets that a site is left out of")


class ControlsConfig(_Placed):
    """What must hold, or must not, if rounding is the cause."""

    models: list[ModelName] = Field(default=list(get_args(ModelName)), description="pretrained and other weights")
    model_conditions: list[ConditionName] = Field(default=["hf_eager_bf16"], description="conditions of every model")
    phases: Count = Field(default=2, description="draws of random phases")


class StudyConfig(_Strict):
    """A study. The experiments are computed in the order of these fields: what says most for its cost comes first."""

    title: str = Field(description="of the study")
    model: ModelConfig = Field(default=ModelConfig(), description="what is studied")
    text: TextConfig = Field(default=TextConfig(), description="what it reads")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of random weights, phases and which documents are taken")
    block: int = Field(default=64, ge=1, le=MOST_TOKENS, description="queries at a time: memory grows with it")
    setups: OutcomesConfig | None = Field(default=None, description="outputs of whole setups")
    dose: DoseConfig | None = Field(default=None, description=f"bits of mantissa at {', '.join(DOSES)}")
    remedies: RemediesConfig | None = Field(default=None, description="what people do against it")
    lengths: LengthsConfig | None = Field(default=None, description="two shifts at many lengths")
    shift_pairs: ShiftPairsConfig | None = Field(default=None, description="many pairs of shifts")
    places: PlacesConfig | None = Field(default=None, description="one document at several places")
    masks: MasksConfig | None = Field(default=None, description="packed documents under every mask")
    sites: SitesConfig | None = Field(default=None, description="outputs with one site rounded")
    factorial: FactorialConfig | None = Field(default=None, description="attention with one site rounded, or not")
    controls: ControlsConfig | None = Field(default=None, description="what must hold if rounding is the cause")

    @property
    def experiments(self) -> dict[str, Experiment]:
        """The sections that are run, by name."""
        sections = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: section for name, section in sections.items() if isinstance(section, Experiment)}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if not self.experiments:
            raise UserError("no experiment; add a section, such as setups")
        longest, given = max(section.longest for section in self.experiments.values()), self.text.tokens
        if given is not None and given < longest:
            raise UserError(f"text.tokens {given}: the longest row has {longest}; give {longest} or more, or remove it")
        return self


def load_study(path: str | Path, overrides: Sequence[str] = ()) -> StudyConfig:
    """Read a study from YAML, with overrides (`lengths=off`). Raises UserError: see `anchorline.settings.load`."""
    return settings.load(StudyConfig, path, overrides, example="shift_pairs.tokens=128", prepare=_sections)


def _sections(tree: settings.Tree) -> settings.Tree:
    """`remedies:` with nothing under it is the experiment with every default; `remedies: off` takes it out."""
    return {key: {} if value is None else value for key, value in tree.items() if value is not False}
