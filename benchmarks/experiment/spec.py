"""The settings of an experiment: a small model, synthetic documents, stages of training, runs that differ only in
arithmetic, mask and seed, and the contrasts that are drawn between them.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, get_args

from pydantic import Field, model_validator

from anchorline import settings
from torchtrain.config import Config, LossWeightConfig
from torchtrain.config.section import Count, Name, PositiveShare, Real, Section, Share
from torchtrain.modeling.rotation import round_queries_and_keys

if TYPE_CHECKING:
    from torch import nn

BOS_EACH = "+bos"  # every document opens with BOS
_OURS = re.compile(r"\+(bos|weighted|shuffled|near)\b")  # what a mask's name says that is none of the trainer's masks
Weights = Literal["weighted", "shuffled", "near"]
Variant = Annotated[
    str, Field(pattern=r"^(full|intra|intra_reset|anchor)(\+tag|\+interleave|\+bos)*(\+weighted|\+shuffled|\+near)?$")
]
Arithmetic = Annotated[str, Field(pattern=r"^(exact|bits[1-9]_(before|after))$")]


def round_model(model: "nn.Module", arithmetic: str) -> None:
    """Make a model in float32 round q, k and their gradients as an arithmetic says. bfloat16 stores 7 bits."""
    if arithmetic != "exact":
        bits, place = arithmetic.removeprefix("bits").split("_")
        round_queries_and_keys(model, "before_rope" if place == "before" else "after_rope", int(bits))


class Run(NamedTuple):
    """One of an experiment's runs."""

    arithmetic: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """The name of its folder and of its measurement."""
        return f"{self.arithmetic}-{self.variant}-{self.seed}"


class ShapeConfig(Section):
    """A LLaMA's shape; its vocabulary is the documents'."""

    layers: Count = Field(default=2, description="decoder layers")
    width: Count = Field(default=128, description="of the residual stream")
    heads: Count = Field(default=4, description="of queries, keys and values")
    head_size: Count = Field(default=32, description="of queries, keys and values")
    inner: Count = Field(default=352, description="width of the MLP")


class WordsConfig(Section):
    """What documents of any task are made of."""

    filler: Annotated[int, Field(ge=4, le=65_536)] = Field(default=29, description="words of the Markov chain")
    seed: int = Field(default=0, ge=0, lt=2**32, description="of documents and of the rows that are measured")


class FactsConfig(WordsConfig):
    """Documents of facts and questions about keys."""

    kind: Literal["facts"]
    keys: Count = Field(description="that facts may be about")
    keys_each: Count = Field(description="keys of a document of the extension; those of a row share none")
    values: Count = Field(description="of each key, its own")
    fact_share: Share = Field(default=0.7, description="how often a fact or a question is drawn instead of filler")
    new_share: Share = Field(default=0.3, description="share of facts among these")
    absent_share: Share = Field(default=0.25, description="share of questions about keys without a fact among these")


class OffsetsConfig(WordsConfig):
    """Documents that ask what stood some tokens back."""

    kind: Literal["offsets"]
    distances: list[Count] = Field(min_length=1, description="that are asked for, each by a word of its own")
    spread: Count = Field(description="neighbouring tokens among which the answer is drawn")
    question_share: Share = Field(description="how often a question is drawn instead of filler, where one can be")


Task = Annotated[FactsConfig | OffsetsConfig, Field(discriminator="kind")]


class StageConfig(Section):
    """One stage of training: its documents and its runs."""

    documents: tuple[Count, Count] = Field(
        strict=False, description="tokens: least and most, drawn evenly in the logarithm"
    )
    full_share: Share = Field(default=0.0, description="share of the documents that fill a row")
    corpus_tokens: Count = Field(description="of all documents")
    run: dict[str, Any] = Field(description="a run's config, without the settings that the experiment makes")

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return int(self.run.get("pack", {}).get("sequence_length", 0))

    def config(
        self, cell: Run, folder: Path, source: Path, corpus: Path, cache: Path, weights: LossWeightConfig | None = None
    ) -> Config:
        """Return the config of a run. Raises UserError: `run` does not fit a run's schema."""
        source_of = {"files": str(corpus), "domain": "source"}
        ours: dict[str, dict[str, Any]] = {
            "run": {"folder": str(folder), "seed": cell.seed},
            "model": {"source": str(source), "dtype": "float32", "fused": "none"},
            "pack": {"variant": re.sub(_OURS, "", cell.variant), "tag_template": "{domain}"},
            "data": {"sources": [source_of], "cache": str(cache), "append_eos": False},
        }
        if weights is not None:
            ours["train"] = {"loss_weight": weights.model_dump()}
        tree = self.run | {section: self.run.get(section, {}) | values for section, values in ours.items()}
        return settings.validate(Config, tree, "run")


Distances = Annotated[list[Count], Field(min_length=1, description="from what tells an answer to the answer")]


class MeasureConfig(Section):
    """How answers are measured, in plain causal rows of one document each."""

    distances: Distances
    rows: Count = Field(default=32, description="that are read, once with BOS and once without")
    queries: Count = Field(default=1, description="of each distance, in each row, at least")


class GateConfig(Section):
    """What a base must do. A seed whose base does not is left out, and counted."""

    distances: Distances
    nats: Real = Field(description="largest mean loss at answers, over the distances")
    sink: Share = Field(default=0.0, description="smallest share of its attention that some head gives to BOS")


class Contrast(Section):
    """A question that compares runs of a seed: the sum of some cells less the sum of as many others."""

    question: Name
    plus: list[str] = Field(min_length=1, description="cells, as bits7_after/intra")
    minus: list[str] = Field(min_length=1, description="cells that are subtracted")
    distance: Count | None = Field(default=None, description="one of measure.distances; default: the mean over all")
    above: Name = Field(default="above 0", description="the reading if its interval is above 0")
    below: Name = Field(default="below 0", description="the reading if its interval is below 0")
    neither: Name = Field(default="not shown", description="the reading if it holds 0")

    @property
    def weights(self) -> dict[tuple[str, str], int]:
        """Of (arithmetic, variant)."""
        signed = [(cell, 1) for cell in self.plus] + [(cell, -1) for cell in self.minus]
        return {(cell.split("/")[0], cell.split("/")[1]): sign for cell, sign in signed}


class TrainingExperiment(Section):
    """The whole of an experiment."""

    title: Name = Field(description="of the report")
    model: ShapeConfig = Field(default=ShapeConfig(), description="the model that is trained")
    task: Task = Field(description="what documents ask")
    theta: Real = Field(default=1e4, description="RoPE's base while bases are pretrained")
    pretrain: list[StageConfig] = Field(min_length=1, description="stages of a base, one after another")
    extend: StageConfig = Field(description="the stage in which runs differ")
    cells: dict[Arithmetic, list[Variant]] = Field(min_length=1, description="masks that are tried in each arithmetic")
    weights: dict[Weights, LossWeightConfig] | None = Field(
        default=None, description="of targets, by the end of a mask's name: intra+weighted"
    )
    first_seed: int = Field(default=0, ge=0, lt=2**31, description="each seed has a base and documents of its own")
    seeds: Count = Field(description="runs of each cell")
    gate: GateConfig = Field(description="what a base must do")
    measure: MeasureConfig = Field(description="how answers are measured")
    noise: list[Annotated[int, Field(ge=1, le=9)]] = Field(description="bits whose errors of scores are measured")
    contrasts: list[Contrast] = Field(min_length=1, description="the family that Holm's correction is over")
    level: PositiveShare = Field(default=0.95, description="of intervals")

    @model_validator(mode="after")
    def _contrasts_are_of_cells(self) -> Self:
        for contrast in self.contrasts:
            if len(contrast.plus) != len(contrast.minus):
                raise ValueError(f"contrasts: {contrast.question!r} does not subtract as many cells as it adds")
            if contrast.distance is not None and contrast.distance not in self.measure.distances:
                raise ValueError(f"contrasts: {contrast.question!r} is at {contrast.distance}, which is not measured")
        ends = {variant.rsplit("+", 1)[-1] for variants in self.cells.values() for variant in variants}
        if missing := sorted(ends & {*get_args(Weights)} - {*(self.weights or ())}):
            raise ValueError(f"cells: end with +{missing[0]}, and weights has no {missing[0]}")
        return self

    def weights_of(self, run: Run) -> LossWeightConfig | None:
        """Return how the targets of a run weigh; None: all alike."""
        return (self.weights or {}).get(run.variant.rsplit("+", 1)[-1])  # type: ignore[call-overload]

    @property
    def same(self) -> dict[str, Any]:
        """The settings in which runs must agree to be compared."""
        others = {"cells", "first_seed", "seeds", "title", "contrasts", "level"}
        others |= {"weights"} if self.weights is None else set()  # as experiments from before there were any
        return self.model_dump(mode="json", exclude=others)

    def runs(self) -> Iterator[Run]:
        """Yield the runs in the order in which they are taken: all cells of a seed, then of the next."""
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            yield from self.runs_of(seed)

    def runs_of(self, seed: int) -> list[Run]:
        """Return the runs of a seed."""
        return [Run(form, variant, seed) for form, variants in self.cells.items() for variant in variants]


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> TrainingExperiment:
    """Read an experiment from YAML, with `section.key=value` overrides. Raises UserError: one line; of `run`, too."""
    experiment = settings.load(TrainingExperiment, path, overrides, example="seeds=10")
    run, (folder, source, corpus, cache) = next(experiment.runs()), map(Path, ("run", "model", "documents", "cache"))
    for stage in (*experiment.pretrain, experiment.extend):
        stage.config(run, folder, source, corpus, cache)
    for weights in (experiment.weights or {}).values():
        experiment.extend.config(run, folder, source, corpus, cache, weights)
    return experiment
