"""The settings of an experiment: a small model, synthetic documents, stages of training, and runs that differ only in
arithmetic, mask and seed.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from anchorline import settings
from torchtrain.config import Config
from torchtrain.config.section import Count, Name, Section, Share

Variant = Literal["full", "intra", "intra_reset", "anchor"]
Arithmetic = Literal["exact", "bf16_before", "bf16_after", "bits1_before", "bits1_after"]

# What each arithmetic sets in a run's `model`; all else is float32.
ARITHMETICS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16_before": {"round_qk": "before_rope", "round_qk_bits": 7},
    "bf16_after": {"round_qk": "after_rope", "round_qk_bits": 7},
    "bits1_before": {"round_qk": "before_rope", "round_qk_bits": 1},
    "bits1_after": {"round_qk": "after_rope", "round_qk_bits": 1},
}


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
    inner: Count = Field(default=352, description="width of the MLP")


class FactsConfig(Section):
    """What documents are made of."""

    keys: Count = Field(default=128, description="that facts may be about")
    values: Count = Field(default=64, description="of each key, its own")
    filler: Annotated[int, Field(ge=4, le=65_536)] = Field(default=61, description="words of the Markov chain")
    fact_share: Share = Field(default=0.7, description="how often a fact or a question is drawn instead of filler")
    new_share: Share = Field(default=0.3, description="share of facts among these")
    absent_share: Share = Field(default=0.25, description="share of questions about keys without a fact among these")
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="of the documents and of the rows in which recall is measured"
    )


class StageConfig(Section):
    """One stage of training: its documents and its runs."""

    documents: tuple[Count, Count] = Field(
        strict=False, description="tokens: least and most, drawn evenly in the logarithm"
    )
    full_share: Share = Field(default=0.0, description="share of the documents that fill a row")
    corpus_tokens: Count = Field(description="of all documents; every seed reads others of them, in another order")
    run: dict[str, Any] = Field(description="a run's config, without the settings that the experiment makes")

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return int(self.run.get("pack", {}).get("sequence_length", 0))

    def config(self, cell: Run, folder: Path, source: Path, corpus: Path, cache: Path) -> Config:
        """Return the config of a run.

        Args:
            cell: arithmetic, variant, seed.
            folder: of the run.
            source: the model that it begins from.
            corpus: the file of the documents.
            cache: of tokens.

        Raises:
            UserError: `run` does not fit a run's schema.
        """
        ours: dict[str, dict[str, Any]] = {
            "run": {"folder": str(folder), "seed": cell.seed},
            "model": {"source": str(source), "dtype": "float32", **ARITHMETICS[cell.arithmetic]},
            "pack": {"variant": cell.variant},
            "data": {"sources": [{"files": str(corpus)}], "cache": str(cache), "append_eos": False},
        }
        tree = self.run | {section: self.run.get(section, {}) | values for section, values in ours.items()}
        return settings.validate(Config, tree, "run")


Distances = Annotated[
    list[Annotated[int, Field(ge=8, multiple_of=4)]],
    Field(min_length=1, description="tokens from a fact to its question"),
]


class MeasureConfig(Section):
    """How recall is measured, in plain causal rows of one document each."""

    distances: Distances
    rows: Count = Field(default=32, description="that are read")
    queries: Count = Field(default=7, description="of each distance, in each row")


class GateConfig(Section):
    """What a base must do before anything else is run."""

    distances: Distances
    recall: Share = Field(default=0.9, description="least mean recall over the distances")


class TrainingExperiment(Section):
    """The whole of an experiment."""

    title: Name = Field(description="of the report")
    model: ShapeConfig = Field(default=ShapeConfig(), description="the model that is trained")
    facts: FactsConfig = Field(default=FactsConfig(), description="what its documents are made of")
    pretrain: list[StageConfig] = Field(min_length=1, description="stages of a base, one after another")
    extend: StageConfig = Field(description="the stage in which runs differ")
    bases: Count = Field(default=2, description="models that are pretrained; seed s extends base s mod bases")
    cells: dict[Arithmetic, list[Variant]] = Field(min_length=1, description="masks that are tried in each arithmetic")
    seeds: Count = Field(description="runs of each cell")
    gate: GateConfig = Field(description="what a base must do")
    measure: MeasureConfig = Field(description="how recall is measured")

    @property
    def same(self) -> dict[str, Any]:
        """The settings in which runs must agree to be compared."""
        return self.model_dump(mode="json", exclude={"cells", "seeds", "title"})

    @property
    def stages(self) -> list[StageConfig]:
        """All stages, the extension last."""
        return [*self.pretrain, self.extend]

    def runs(self) -> Iterator[Run]:
        """Yield the runs in the order in which they are taken: all cells of a seed, then of the next."""
        for seed in range(self.seeds):
            for arithmetic, variants in self.cells.items():
                for variant in variants:
                    yield Run(arithmetic, variant, seed)


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> TrainingExperiment:
    """Read an experiment's YAML file, apply `section.key=value` overrides, validate.

    Raises:
        UserError: one line that names what does not fit, also in `run`.
    """
    experiment = settings.load(TrainingExperiment, path, overrides, example="seeds=10")
    for stage in experiment.stages:
        stage.config(next(experiment.runs()), *map(Path, ("runs/experiment", "model", "documents.jsonl", "cache")))
    return experiment
