"""The results of a study, and the two files that hold them: `results.json`, and a compact file for a repository.

Results are a flat list of records of two kinds: how far attention is apart, and how far outputs are apart. A number is
a `Stat`: the mean over the sequences, and the value of each one.

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
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from anchorline.errors import UserError, one_line, quoted
from anchorline.files import replace_file

RESULTS = "results.json"
DIGITS = 7  # of a number in a compact file
Mode = Literal["local", "propagated"]
AttentionGroup = Literal[
    "shift_pairs", "lengths", "baseline", "on_alone", "off_alone", "remedy", "control", "mask", "place"
]
OutputsGroup = Literal["setup", "dose", "site"]
Group = AttentionGroup | OutputsGroup
Against = Literal["shift", "exact", "phases", "reset"]
Opening = Literal["bos", "anchor", "none"]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="strings")


class Stat(_Part):
    """One number over the sequences."""

    mean: float
    values: list[float] = Field(description="each sequence's own")


N = TypeVar("N", float, Stat)


class Difference(_Part, Generic[N]):
    """Every measure of the attention of two runs a, b of one row, each summed over all layers and heads.

    N is `Stat`, or `float` for one sequence.
    """

    d: N = Field(description="eq. 4: sum over layers, heads, columns j of n_j sum_i |ATTN_ij(a) - ATTN_ij(b)|")
    first_share: N = Field(description="column 0's part of d, 0 to 1")
    first_mass_unweighted: N = Field(description="column 0's part of the attention mass: its mean probability")
    d_logit_first: N = Field(description="eq. 5: n_0 sum_i |dLOGIT_i0|, logits before softmax, scaled as in softmax")
    d_logit_rest: N = Field(description="the mean over columns j > 0 of n_j sum_i |dLOGIT_ij|, visible pairs only")
    row: N = Field(description="mean over queries, layers, heads of sum_j |dATTN_ij|: 0 to 2, does not grow with T")


class Columns(_Part):
    """Token by token, each list [T], means over sequences."""

    d: list[float] = Field(description="the paper's per-token D: n_j sum_i |dATTN_ij|, over layers and heads")
    d_logit: list[float] = Field(description="n_j sum_i |dLOGIT_ij|")


class OutputDivergence(_Part, Generic[N]):
    """How far two output distributions p, q are apart: mean over positions of sum p log(p / q), in nats; how often the
    argmax differs; and the losses of both.
    """

    kl: N
    argmax_differs: N = Field(description="fraction of positions")
    nll_p: N | None = Field(default=None, description="mean over targets of -log p, nats; None where no loss was taken")
    nll_q: N | None = None
    right_p: N | None = Field(default=None, description="fraction of targets that are p's argmax")
    right_q: N | None = None


class Record(_Part):
    """A comparison of a condition with something else, on rows of one length."""

    group: Group = Field(description="which question of which experiment the record answers")
    model: str = Field(description="pretrained, shuffled, or an initialisation of `models.INITIALISATIONS`")
    condition: str = Field(description="name of the roundings: a preset, or `on table`, `hf_eager_bf16 - table`, ...")
    about: str = Field(description="the condition in words")
    base: str | None = Field(default=None, description="preset the condition starts from; None where there is none")
    site: str | None = Field(
        default=None,
        description="of on_alone, off_alone, dose and site: the site of `Rounding`; `qk, scaled` are sites left out "
        "together, because each alone rounds what the other has rounded",
    )
    mantissa_bits: int | None = Field(
        default=None, description="of a dose: bits of the format; its exponent is float32's"
    )
    tokens: int = Field(description="of each sequence")
    sequences: int
    mask: str = Field(default="full", description="full, intra, intra_reset, anchor")
    opening: Opening = Field(default="bos", description="what the row has before its document")
    gap: int = Field(
        default=0, description="between the positions of the row's two halves; after an anchor: between it and the rest"
    )
    d1: int = Field(description="shift of the condition: the position of a row's first token")
    against: Against = Field(
        description="what the condition is compared with: itself at the shift d2; `exact` at d2 (same mask and text); "
        "itself without random phases; or itself under intra_reset"
    )
    d2: int = Field(description="shift of the other run")


class AttentionRecord(Record):
    """How far the attention of the two runs is apart."""

    kind: Literal["attention"] = "attention"
    attention_from: str = Field(
        default="oracle", description="`oracle`; in a kept study also an implementation that it was compared with"
    )
    mode: Mode
    difference: Difference[Stat]
    columns: Columns | None = Field(default=None, description="of shifts 0 and 16 in the group shift_pairs")


class OutputsRecord(Record):
    """How far the outputs of the two runs are apart. Each run is a forward pass of its own.

    `outputs.p` is `exact`, and `outputs.q` the condition. Where `exact` is not compared, p is the condition at d1.
    """

    kind: Literal["outputs"] = "outputs"
    task: Literal["text", "copy"] = Field(default="text", description="plain text, or copying a key seen long before")
    outputs: OutputDivergence[Stat]


AnyRecord = Annotated[AttentionRecord | OutputsRecord, Field(discriminator="kind")]


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

    schema_version: Literal[3] = 3
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


def write_results(results: Results, folder: Path) -> None:
    """Write `results.json` into a folder, whole or not at all."""
    replace_file(folder / RESULTS, (results.model_dump_json(indent=1) + "\n").encode())


def write_compact(results: Results, path: Path) -> None:
    """Write a study into one file of some hundred kilobytes. The same results give the same bytes."""
    text = json.dumps(_rounded(results.model_dump(mode="json")), separators=(",", ":"))
    replace_file(path, lzma.compress(text.encode(), preset=9))


def read_results(path: Path) -> Results:
    """Read a study: its folder, or its compact file. Raises UserError: there is none, or the file is damaged."""
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
