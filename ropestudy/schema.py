"""`results.json`, version 2: what one study found. The report reads only this.

A study is a flat list of records. Each says which experiment it belongs to, which model and condition it is of, over
how many sequences of how many tokens, and holds its numbers as `Stat`: the mean over sequences, their spread, and each
one's own value (a single sample of the paper is `values[i]`).

What is compared is always the attention of two runs that are the same function in exact arithmetic. A run is a
condition (roundings, and what `Rounding` cannot say) and the position ids; a shift d is added to all of these.
`Difference` holds every measure of one pair of runs. Its two modes:

    local       both runs are given the same input at every layer: the first condition's own, from its run at shift 0
    propagated  each run is a forward pass of its own, as a model has it

Two warnings about every share. The rows of attention sum to one, so what one column loses others
gain: a column's *unweighted* share of sum |dATTN| cannot exceed a half. And n (`measures.weights`) divides a column by
the queries that see it, so the last columns weigh most in D: both forms are recorded.

Legend: T tokens of a row · L layers · H heads · j column (key) · i row (query).
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from anchorline.errors import UserError
from anchorline.files import replace_file

VERSION = 2
FORMER_KINDS = ("own_error", "emulation_check", "signed_bias", "by_frequency")
Mode = Literal["local", "propagated"]
Group = Literal["on_alone", "off_alone", "baseline", "remedy", "control", "first_token", "mask"]


class _Part(BaseModel):
    # Kept studies may hold numbers that are no longer made.
    model_config = ConfigDict(extra="ignore", frozen=True, ser_json_inf_nan="strings")


class Stat(_Part):
    """One number over the sequences."""

    mean: float
    values: list[float] = Field(description="each sequence's own")


class Difference(_Part):
    """Every measure of the attention of two runs a, b of one row, each summed over all layers and heads."""

    d: Stat = Field(description="eq. 5: sum over layers, heads, columns j of n_j sum_i |ATTN_ij(a) - ATTN_ij(b)|")
    first_share: Stat = Field(description="column 0's part of d, 0 to 1")
    first_mass_unweighted: Stat = Field(description="column 0's part of the attention mass: its mean probability")
    d_logit_first: Stat = Field(description="eq. 6: n_0 sum_i |dLOGIT_i0|, logits before softmax, scaled as in softmax")
    d_logit_rest: Stat = Field(description="the mean over columns j > 0 of n_j sum_i |dLOGIT_ij|, visible pairs only")
    row: Stat = Field(description="mean over queries, layers, heads of sum_j |dATTN_ij|: 0 to 2, does not grow with T")


class Columns(_Part):
    """Token by token, each list [T], means over sequences."""

    d: list[float] = Field(description="the paper's per-token D: n_j sum_i |dATTN_ij|, over layers and heads")
    d_logit: list[float] = Field(description="n_j sum_i |dLOGIT_ij|")


class Record(_Part):
    """What every record says of itself."""

    model: str = Field(description="pretrained, shuffled, or an initialisation of `models.INITIALISATIONS`")
    condition: str = Field(description="name of the roundings: a preset, or `on table`, `hf_eager_bf16 - table`, ...")
    attention_from: str = Field(
        default="oracle", description="`oracle`, or the torch implementation that computed it, such as `torch eager`"
    )
    tokens: int = Field(description="of each sequence")
    sequences: int


class PairDifference(_Part):
    """One pair of shifts."""

    d1: int
    d2: int
    difference: Difference


class ShiftPairs(Record):
    """The paper's figure 1, left, and the appendix: D of many pairs of shifts.

    `d2 == 16` are the paper's points; `d1 == 0` the same with d2 varied; all together the grid over d1 and d2. Every
    pair is there once with d1 < d2: D is symmetric, and a reader takes it from either side. Pairs of equal shifts are
    left out, theirs is 0.
    """

    kind: Literal["shift_pairs"] = "shift_pairs"
    mode: Mode
    pairs: list[PairDifference]


class PerToken(Record):
    """Figure 1, middle: the difference of one pair of shifts, token by token."""

    kind: Literal["per_token"] = "per_token"
    mode: Mode
    d1: int
    d2: int
    difference: Difference
    columns: Columns


class LengthPoint(_Part):
    """One length."""

    tokens: int
    sequences: int
    shift: Difference = Field(description="shift d1 against d2")
    error: Difference | None = Field(description="the condition against float64, both at d1; None of `exact` itself")


class ByLength(Record):
    """Figure 1, right: what grows with the length. `tokens` is the longest."""

    kind: Literal["by_length"] = "by_length"
    mode: Mode
    d1: int
    d2: int
    points: list[LengthPoint]


class OutputDivergence(_Part):
    """Of two output distributions p, q: mean over positions of sum p log(p / q), in nats, and how often the argmax
    differs.
    """

    kl: Stat
    argmax_differs: Stat = Field(description="fraction of positions")
    nll_p: Stat | None = Field(
        default=None, description="mean over targets of -log p, nats; None where no loss was taken"
    )
    nll_q: Stat | None = None
    right_p: Stat | None = Field(default=None, description="fraction of targets that are p's argmax")
    right_q: Stat | None = None


class Score(Record):
    """One condition on every scale: a row of the factorial, of the remedies, the controls, the first token's or the
    masks'.

    `shift`: the condition at d1 against itself at d2. `error`: the condition at shift d1 against `exact` at d1, same
    mask and text. Keys of both are modes. KL is always propagated. The control of random phases has d2 == d1: its
    `shift` compares the condition without the phases (a) and with them (b).
    """

    kind: Literal["score"] = "score"
    group: Group
    base: str | None = Field(description="preset the condition starts from; None where there is none")
    site: str | None = Field(
        description="of on_alone and off_alone: the site of `Rounding`; `qk, scaled` are sites left out together, "
        "because each alone rounds what the other has rounded"
    )
    text: str = Field(description="where the BOS is: first, none, middle")
    mask: str = Field(description="full, intra, intra_reset, anchor, anchor_reset")
    about: str = Field(description="the condition in words")
    d1: int
    d2: int
    gap: int = Field(default=0, description="between the positions of the row's two halves")
    shift: dict[Mode, Difference]
    error: dict[Mode, Difference]
    kl_shift: OutputDivergence = Field(description="of the outputs at d1 from those at d2")
    kl_error: OutputDivergence = Field(description="of `exact`'s outputs from the condition's, at d1")


class MaskPair(Record):
    """Packed documents: the same tokens under two choices of position ids, or two masks.

    `a` and `b` are names of masks; at shift 0. In `exact`, intra against intra_reset is zero to float64's own noise;
    anchor against anchor_reset (documents restart at 1, after the anchor at 0) is not, because their distances to the
    anchor differ: that is what the anchor changes mathematically.
    """

    kind: Literal["mask_pair"] = "mask_pair"
    mode: Mode
    a: str
    b: str
    documents: list[int] = Field(description="tokens of each document of the first sequence")
    difference: Difference
    kl: OutputDivergence = Field(description="of the outputs under a from those under b; propagated in either mode")


class Outcome(Record):
    """The outputs of one condition against those of `exact`, for plain text or for copying a key seen long before.

    Sequences are computed together; `outputs.p` is `exact`, `outputs.q` the condition, both at the same positions.
    """

    kind: Literal["outcome"] = "outcome"
    group: Literal["setup", "dose", "site"]
    task: Literal["text", "copy"]
    about: str
    start: int = Field(description="position of the row's first token")
    gap: int = Field(description="between the positions of the row's two halves")
    site: str | None = Field(default=None, description="of dose and site: what is rounded")
    mantissa_bits: int | None = Field(default=None, description="of dose: of the format, whose exponent is float32's")
    outputs: OutputDivergence


AnyRecord = Annotated[
    ShiftPairs | PerToken | ByLength | Score | MaskPair | Outcome,
    Field(discriminator="kind"),
]


class StudyEnvironment(_Part):
    """Where the study took place."""

    versions: dict[str, str] = Field(description="python, jax, jaxlib, flax, numpy, ..., anchorline")
    hardware: str
    device: str = Field(description="what JAX computes on: cpu, gpu")
    git_commit: str | None
    git_dirty: bool | None


class ModelDescription(_Part):
    """The model that was studied."""

    source: str = Field(description="as the configuration names it")
    config: dict[str, Any] = Field(description="as config.json has it")
    weights: str = Field(description="dtype to which every parameter was rounded before anything else")
    parameters: int
    sha256: str = Field(description="of the parameters as stored, in the order of their names")
    initialisations: dict[str, str] = Field(description="each random model that was used, in words")


class TextDescription(_Part):
    """The text that was read."""

    source: str
    bos: int | None = Field(description="token id that opens each sequence; None if the tokenizer has none")
    documents: list[str] = Field(description="where the sequences come from, in their order")


class Results(_Part):
    """The whole of a study."""

    schema_version: Literal[2] = VERSION
    title: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float = Field(description="of computing, all cells together, also those kept from an earlier run")
    command: str
    environment: StudyEnvironment
    config: dict[str, Any] = Field(description="the resolved configuration, every default written out")
    model: ModelDescription
    text: TextDescription
    cells: dict[str, tuple[int, int]] = Field(
        default={}, description="by experiment: cells that were computed, and all; records are of finished ones alone"
    )
    records: list[AnyRecord]

    @field_validator("records", mode="before")
    @classmethod
    def _leave_out_former_kinds(cls, records: Any) -> Any:
        """Kept studies hold records of kinds that are no longer made."""
        if not isinstance(records, list):
            return records
        return [one for one in records if not isinstance(one, dict) or one.get("kind") not in FORMER_KINDS]


def write_results(results: Results, path: Path) -> None:
    """Write `results.json`, whole or not at all."""
    replace_file(path, (results.model_dump_json(indent=1) + "\n").encode())


def read_results(path: Path) -> Results:
    """Read a study. Raises UserError, one line: no file, not JSON, not this version of the schema."""
    if not path.is_file():
        raise UserError(f"results {path}: no such file")
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except (ValidationError, UnicodeDecodeError) as error:
        first = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise UserError(f"results {path}: not of schema version {VERSION}: {' '.join(first.split())}") from None
