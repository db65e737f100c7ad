"""What a paper publishes, read strictly, and which of its rows is of the same model, data, variant and length as a run.

Its numbers are data (`configs/paper/results.yaml`). Nothing is computed of them: no mean, no difference, no interval.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from anchorline import settings
from torchtrain.config import Count, Name, PackConfig, PositiveShare, Real, Section
from torchtrain.evaluation.measured import Measured
from torchtrain.evaluation.results import Training
from torchtrain.evaluation.suite import IN_2024, LONGBENCH, TASKS

PLACE = Path("configs/paper/results.yaml")
Scores = Literal["ruler_11", "ruler_13", "ruler_tasks", "short", "longbench"]
ICL = "LongBench ICL"
Percent = Annotated[float, Field(ge=0, le=100)]
# What a number is of: besides the kind, the tokens of a prompt, if they are not the column; and the column, which is a
# length of ruler_11 and ruler_13, a task, one of LongBench's groups, or a benchmark.
Column = tuple[str, int | None, int | str]


class PublishedTraining(Section):
    """What a published model was trained on, and for how long."""

    dataset: Name | None = Field(description="hub id; null: not said, and then no run is the same")
    shares: dict[Name, PositiveShare] | None = Field(
        default=None, description="token shares of its domains, long documents more often; null: the data set as it is"
    )
    sequence_length: Count
    rope_theta: Real
    sequences_per_step: Count
    steps: tuple[Count, Count] = Field(
        strict=False, description="the first and the last step whose models scores are of; the last ends the training"
    )

    def is_of(self, training: Training) -> bool:
        """Whether a run of ours was trained so."""
        rope = training.rope
        return (
            training.sequence_length == self.sequence_length
            and (rope.get("rope_type"), rope.get("rope_theta")) == ("default", self.rope_theta)
            and training.sequences_per_step == self.sequences_per_step
            and training.steps == self.steps[1]
            and self._is_of_data(training.data)
        )

    def _is_of_data(self, made_of: dict[str, Any]) -> bool:
        """Whether tokens are of this data set, whole documents of a random sample of it, mixed alike."""
        sources, mixture = made_of.get("sources"), made_of.get("mixture")
        if self.dataset is None or not isinstance(sources, list) or len(sources) != 1:
            return False
        source = sources[0]
        whole = (source.get("split"), source.get("subset"), source.get("max_documents")) == ("train", None, None)
        if source.get("dataset") != self.dataset or not whole:
            return False
        if self.shares is None or mixture is None:
            return self.shares is None and mixture is None
        longer = mixture.get("long_weight") is not None or mixture.get("long_share") is not None
        return mixture.get("shares") == self.shares and longer


class PublishedTable(Section):
    """Rows of one kind of score: of models that were trained alike by variant, or of models as they are by name."""

    table: Count = Field(description="its number in the paper")
    scores: Scores
    model: Name | None = None
    training: Name | None = None
    length: Count | None = Field(default=None, description="of ruler_tasks: tokens")
    columns: list[Name | Count] = Field(min_length=1)
    rows: dict[Name, list[Percent | None]] = Field(min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.model is None) != (self.training is None):
            raise ValueError(f"table {self.table}: model and training stand together; give both or none")
        known: dict[str, Sequence[str]] = {
            "ruler_tasks": [*TASKS, *IN_2024],
            "short": [ICL, "HellaSwag", "MMLU"],
            "longbench": list(LONGBENCH),
        }
        if (self.length is not None) != (self.scores == "ruler_tasks"):
            raise ValueError(f"table {self.table}: length belongs to ruler_tasks, and every such table has one")
        for column in self.columns:
            named = known.get(self.scores)
            if not isinstance(column, int) if named is None else column not in named:
                raise ValueError(f"table {self.table}: {self.scores} has no column {column!r}")
        for name, row in self.rows.items():
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.table}: {name} has {len(row)} numbers for {len(self.columns)} columns")
            if self.training is not None:
                PackConfig(sequence_length=2, variant=name)
        return self


@dataclass(frozen=True)
class PublishedScore:
    """A number of the paper, per cent, the table that it stands in, and what the paper does not say of it."""

    score: float
    table: int
    unsaid: str


class Publication(Section):
    """The tables of a paper."""

    arxiv: Name
    version: Count
    models: dict[Name, Name | None] = Field(description="hub id of what the paper calls a model; null: it names none")
    trainings: dict[Name, PublishedTraining]
    unsaid: dict[Scores, Name] = Field(description="of a kind of score, what the paper does not say")
    tables: list[PublishedTable] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        for table in self.tables:
            models = [table.model] if table.model is not None else list(table.rows)
            for name, known in [(table.training, self.trainings), *((model, self.models) for model in models)]:
                if name is not None and name not in known:
                    raise ValueError(f"table {table.table}: {name!r} is not described above")
            if table.scores not in self.unsaid:
                raise ValueError(f"table {table.table}: unsaid has no {table.scores}")
        return self

    def scores_of(
        self, training: Training | None, source: str, steps: Iterable[int | None]
    ) -> dict[Column, PublishedScore]:
        """Return the numbers of the same model, data, variant and length as a run's; {} where there are none.

        LongBench's are taken as measured at the trained length; the paper does not say at which.

        Args:
            training: how the run came about; None: not known, or a model as it was published.
            source: the run's model, a hub id or a folder.
            steps: of the checkpoints that were measured.
        """
        found: dict[Column, PublishedScore] = {}
        told = [*steps]
        for table in self.tables:
            row = self._row_of(table, training, source, told)
            for column, score in zip(table.columns, row or [], strict=row is not None):
                length = table.length
                if table.scores == "longbench" or column == ICL:
                    if training is None:
                        continue  # at which length is not said
                    length = training.sequence_length
                if score is not None:
                    found[table.scores, length, column] = PublishedScore(score, table.table, self.unsaid[table.scores])
        return found

    def _row_of(
        self, table: PublishedTable, training: Training | None, source: str, steps: list[int | None]
    ) -> list[float | None] | None:
        if table.training is None:
            plain = training is None and all(step is None for step in steps)
            named = [name for name in table.rows if self.models[name] is not None and self.models[name] == source]
            return table.rows[named[0]] if plain and named else None
        assert table.model is not None
        published, model = self.trainings[table.training], self.models[table.model]
        if training is None or model is None or training.model != model or not published.is_of(training):
            return None
        first, last = published.steps
        if not all(step is not None and first <= step <= last for step in steps):
            return None
        variants = {frozenset(name.split("+")): row for name, row in table.rows.items()}
        return variants.get(frozenset(training.variant.split("+")))


def load_published(path: str | Path = PLACE) -> Publication:
    """Read published tables.

    Raises:
        UserError: as `anchorline.settings.load`.
    """
    return settings.load(Publication, path, example="version=2")


def published_scores(run: Measured, published: Publication) -> dict[Column, PublishedScore]:
    """Return what is published of a run: nothing unless all its checkpoints were trained alike and were asked as the
    paper's were, with nothing before the prompts. RULER's needs its tasks as they were in October 2024, and RULER's
    kind of haystack; LongBench's tasks in lm-eval differ from LongBench's own, so that nothing of it is shown.
    """
    results = [of for each in run.found.values() for of in each]
    trainings = {of.training.model_dump_json() if of.training else "" for of in results}
    if len(trainings) != 1 or any(of.settings.anchor or of.identity.get("chat_template") for of in results):
        return {}
    found = published.scores_of(results[0].training, results[0].source, {of.step for of in results})
    found = {key: score for key, score in found.items() if key[0] != "longbench" and key[2] != ICL}
    haystacks = {of.identity.get("materials", {}).get("haystack") for of in results} - {None}
    other = any(text.startswith("demo ") or not text.endswith("sentences english") for text in haystacks)
    if other or {*IN_2024.values()} & {*run.tasks()}:
        found = {key: score for key, score in found.items() if not key[0].startswith("ruler")}
    return found


def format_score(score: float) -> str:
    """Return a published number as it is printed, with one decimal at least."""
    assert math.isfinite(score)
    return f"{score:.2f}" if round(score, 1) != score else f"{score:.1f}"
