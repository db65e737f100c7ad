"""An experiment: one run's settings, and what its many runs differ in. YAML in, a strict schema out."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from anchorline import settings
from anchorline.errors import UserError
from torchtrain.config import Config, Count, Name, PathText, Section, Source

EXAMPLE = "seeds=[0,1,2]"  # of an override, for messages
REFERENCE = "float32"  # the arithmetic in which nothing but mathematics is left

Variant = Literal["full", "intra", "intra_reset", "anchor"]
Arithmetic = Literal["bfloat16", "rotation_float32", "float32"]

# What each arithmetic changes in a run. The masters and the optimizer are float32 in all.
ENGINES = ("sdpa", "flex", "dense")  # that compute in float32 and in bfloat16 alike
ARITHMETICS: dict[str, dict[str, str]] = {
    "bfloat16": {"dtype": "bfloat16", "rotation": "model"},
    "rotation_float32": {"dtype": "bfloat16", "rotation": "float32"},
    "float32": {"dtype": "float32", "rotation": "model"},
}


_EXTENDABLE = ("seeds", "arithmetics", "variants", "title", "cache")  # what may change under runs that exist


class CorpusConfig(Section):
    """Documents: most are cut at line ends into pieces to train on, so that a row holds several; the others stay whole
    and are measured on.
    """

    sources: list[Source] = Field(min_length=1, max_length=64)
    characters: tuple[Count, Count] = Field(
        default=(200, 3000),
        strict=False,
        description="length of a piece: least and most, drawn evenly in its logarithm",
    )
    measured_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.1, description="share of the documents that no run trains on"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        least, most = self.characters
        if least > most:
            raise ValueError(f"characters: the least, {least}, is more than the most, {most}")
        return self


class MeasureConfig(Section):
    """What is asked of each trained model, in float32 and with plain causal attention."""

    tokens: Count = Field(description="of a document that is measured, its first so many; with the anchor in front")
    documents: Annotated[int, Field(ge=2, le=65_536)] = Field(
        default=32, description="of all sources in turn, each longer than `tokens`"
    )
    bands: list[Count] = Field(
        default=[64, 256, 512, 768], min_length=1, description="positions at which a new band of the loss begins"
    )
    distances: list[Count] = Field(
        default=[64, 256, 896],
        min_length=1,
        description="tokens from where a passage begins to where its copy does, whose loss is taken",
    )
    passage: Annotated[int, Field(ge=2, le=1024)] = Field(default=24, description="tokens of the passage")

    margin: Annotated[float, Field(gt=0, le=100)] = Field(
        default=0.01, description="nats a token; a smaller effect is taken for none"
    )

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Positions of each band, the last excluded."""
        return list(zip([1, *self.bands], [*self.bands, self.tokens], strict=True))

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if sorted(set(self.bands)) != self.bands or self.bands[-1] >= self.tokens:
            raise ValueError(f"bands {self.bands}: give them in rising order, all below tokens ({self.tokens})")
        if max(self.distances) + self.passage >= self.tokens or min(self.distances) < self.passage:
            raise ValueError(
                f"distances {self.distances}: each must be at least passage ({self.passage}) and leave room for it "
                f"within tokens ({self.tokens})"
            )
        return self


class PairedRun(NamedTuple):
    """One of an experiment's runs."""

    arithmetic: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.arithmetic}-{self.variant}-{self.seed}"


class TrainingExperiment(Section):
    """The whole of an experiment."""

    title: Name
    run: dict[str, Any] = Field(
        description="a run's config but for what the experiment sets: run.folder, run.seed, model.dtype, "
        "model.rotation, pack.variant, data.sources, data.cache, train.steps and save"
    )
    corpus: CorpusConfig
    arithmetics: list[Arithmetic] = Field(default=["bfloat16", "rotation_float32", "float32"], min_length=1)
    variants: list[Variant] = Field(default=["full", "intra", "intra_reset", "anchor"], min_length=1)
    seeds: list[Annotated[int, Field(ge=0, lt=2**32)]] = Field(default=[0, 1, 2], min_length=1)
    stages: list[Count] = Field(min_length=1, description="steps at which every run is measured; the last ends it")
    measure: MeasureConfig
    cache: PathText = Field(default="cache", description="as data.cache of every run")

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        for name in ("arithmetics", "variants", "seeds"):
            if len(set(getattr(self, name))) != len(getattr(self, name)):
                raise ValueError(f"{name}: one stands twice; remove it")
        if sorted(set(self.stages)) != self.stages:
            raise ValueError(f"stages {self.stages}: give them in rising order")
        if len(self.stages) > 1 and any(step % self.stages[0] for step in self.stages):
            raise ValueError(f"stages {self.stages}: each must be a multiple of the first, for runs save every so many")
        if not ("intra" in self.variants and len(self.variants) > 1) and not (
            REFERENCE in self.arithmetics and len(self.arithmetics) > 1
        ):
            raise ValueError(
                f"arithmetics and variants: nothing can be compared; give {REFERENCE} and another arithmetic, or intra "
                "and another variant"
            )
        return self

    def cells(self) -> Iterator[PairedRun]:
        """Yield the runs in the order in which they are taken: a seed after another."""
        for seed in self.seeds:
            for arithmetic in self.arithmetics:
                for variant in self.variants:
                    yield PairedRun(arithmetic, variant, seed)

    def config(self, cell: PairedRun, folder: Path, corpus: Path) -> Config:
        """Return the config of one run.

        Args:
            cell: which.
            folder: of the experiment.
            corpus: the file of the pieces.

        Raises:
            UserError: `run` does not fit a run's schema, or sets what the experiment sets.
        """
        ours: dict[str, dict[str, Any]] = {
            "run": {"folder": str(folder / "runs" / cell.name), "seed": cell.seed},
            "model": dict(ARITHMETICS[cell.arithmetic]),
            "pack": {"variant": cell.variant},
            "data": {"sources": [{"files": str(corpus), "domain_field": "domain"}], "cache": self.cache},
            "train": {"steps": self.stages[-1]},
        }
        if "save" in self.run:
            raise UserError("run.save: the experiment sets it; remove it")
        saves = {"every": self.stages[0], "keep": 1, "last": len(range(0, self.stages[-1], self.stages[0])) or 1}
        tree = {name: dict(section) if isinstance(section, dict) else section for name, section in self.run.items()}
        for section, values in ours.items():
            given = tree.setdefault(section, {})
            if not isinstance(given, dict):
                raise UserError(f"run.{section}: expected a section, found {type(given).__name__}")
            if stray := sorted(set(given) & set(values)):
                raise UserError(f"run.{section}.{stray[0]}: the experiment sets it; remove it")
            given.update(values)
        tree["save"] = saves
        config = settings.validate(Config, tree, "run")
        if REFERENCE in self.arithmetics and config.model.attention not in ENGINES:
            raise UserError(
                f"run.model.attention {config.model.attention}: float32 and bfloat16 would run in different engines, "
                f"which would count as arithmetic; choose one of {', '.join(ENGINES)}"
            )
        if self.measure.tokens > config.pack.sequence_length:
            raise UserError(
                f"measure.tokens {self.measure.tokens} is more than run.pack.sequence_length "
                f"{config.pack.sequence_length}, which the runs train for; lower it"
            )
        return config


def other_setting(experiment: TrainingExperiment, found: Mapping[str, Any]) -> str | None:
    """Return the first setting in which a dumped experiment is another, None where its measurements are of this one."""
    wanted = experiment.model_dump(mode="json")
    for name, value in wanted.items():
        there = found.get(name)
        if name == "measure" and isinstance(there, dict):  # the margin is a report's alone
            value, there = ({**tree, "margin": None} for tree in (value, there))
        if name not in _EXTENDABLE and value != there:
            return name
    return None


def load_experiment(path: Path, overrides: Sequence[str] = ()) -> TrainingExperiment:
    """Read an experiment's YAML file, apply `section.key=value` overrides, validate.

    Raises:
        UserError: one line that names what does not fit, what `run` says among it.
    """
    experiment = settings.load(TrainingExperiment, path, overrides, example=EXAMPLE)
    experiment.config(next(experiment.cells()), Path("runs/experiment"), Path("train.jsonl"))
    return experiment
