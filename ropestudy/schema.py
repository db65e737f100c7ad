"""The results of a study, and the two files that hold them: `results.json`, and a compact file for a repository.

Results are a flat list of records. Each names its experiment, model and condition, the number of sequences and their
length. It holds its numbers as `Stat`: the mean over the sequences, and the value of each one.

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

import json
import lzma
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from anchorline.errors import UserError, one_line, quoted
from anchorline.files import replace_file

RESULTS = "results.json"
DIGITS = 7  # of a number in a compact file
Mode = Literal["local", "propagated"]
Group = Literal["on_alone", "off_alone", "baseline", "remedy", "control", "mask"]
OutcomeGroup = Literal["setup", "dose", "site"]


class _Part(BaseModel):
    # The kept studies hold numbers that are no longer made.
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
    """What every record says about itself."""

    model: str = Field(description="pretrained, shuffled, or an initialisation of `models.INITIALISATIONS`")
    condition: str = Field(description="name of the roundings: a preset, or `on table`, `hf_eager_bf16 - table`, ...")
    attention_from: str = Field(
        default="oracle", description="`oracle`; in a kept study also an implementation that it was compared with"
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
    """One condition on every scale: a row of the factorial, of the remedies, the controls or the masks.

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
    mask: str = Field(description="full, intra, intra_reset, anchor")
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

    `a` and `b` are names of masks; both runs are at shift 0. In `exact` the difference is float64's own noise.
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
    group: OutcomeGroup
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


class ModelDescription(_Part):
    """The model that was studied."""

    source: str = Field(description="as the configuration names it")
    config: dict[str, Any] = Field(description="as config.json has it")
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

    schema_version: Literal[2] = 2
    title: str
    created: str = Field(description="ISO 8601, UTC")
    seconds: float = Field(description="of computing, all cells together, also those kept from an earlier run")
    command: str
    environment: dict[str, Any] = Field(
        description="versions, hardware, device (what JAX computes on), git_commit, git_dirty"
    )
    config: dict[str, Any] = Field(description="the resolved configuration, every default written out")
    model: ModelDescription
    text: TextDescription
    records: list[AnyRecord] = Field(description="of the experiments that are finished")

    @field_validator("records", mode="before")
    @classmethod
    def _leave_out_former_records(cls, records: list[Any]) -> list[Any]:
        """The kept studies hold records of experiments that are no longer there."""
        return [one for one in records if isinstance(one, BaseModel) or _is_known(one)]


KINDS = {one.model_fields["kind"].default for one in get_args(get_args(AnyRecord)[0])}


def _is_known(record: dict[str, Any]) -> bool:
    return record["kind"] in KINDS and record.get("group") != "first_token"


def write_results(results: Results, folder: Path) -> None:
    """Write `results.json` into a folder, whole or not at all."""
    replace_file(folder / RESULTS, (results.model_dump_json(indent=1) + "\n").encode())


def write_compact(results: Results, path: Path) -> None:
    """Write a study into one file of some hundred kilobytes. The same results give the same bytes."""
    text = json.dumps(_rounded(results.model_dump(mode="json")), separators=(",", ":"))
    replace_file(path, lzma.compress(text.encode(), preset=9))


def read_results(path: Path) -> Results:
    """Read a study: its folder, or its compact file.

    Raises:
        UserError: there is no such study, or the file is damaged or not one.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        content = file.read_bytes()
        return Results.model_validate_json(content if path.is_dir() else lzma.decompress(content))
    except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{quoted(file)} does not hold the results of a study: {one_line(reason)}") from None


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(held) for key, held in value.items()}
    if isinstance(value, list):
        return [_rounded(held) for held in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
