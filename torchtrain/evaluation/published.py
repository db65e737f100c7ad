"""The numbers of the paper (`configs/paper/results.yaml`), and which of them belong next to a run of ours.

A number is shown only next to a run of the same model, data, variant, split, trained length and steps. Nothing is
computed from it: no mean, no difference, no interval.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from anchorline import settings
from torchtrain.config import Count, Name, PositiveShare, Real, Section
from torchtrain.evaluation.measured import Column, Measured
from torchtrain.evaluation.results import Training
from torchtrain.evaluation.suite import IN_2024

PLACE = Path("configs/paper/results.yaml")
_UNSAID = (
    "The paper does not say how many samples RULER's scores have, which haystack (RULER's own are essays), nor which "
    "of HellaSwag's two scores it gives."
)
_UNSAID_OF_SPLITS = (
    "The paper says that interleaved chunks are cut at random points. The authors' code cuts by another rule "
    "(pack.split: authors), cuts the row instead of the document, and never turns it on. What made these rows is "
    "unknown."
)


class PublishedTraining(Section):
    """How a published model was trained."""

    dataset: Name | None  # hub id; null: the paper does not say, and no run matches
    shares: dict[Name, PositiveShare] | None = None  # of tokens by domain, long documents more often; null: as it is
    sequence_length: Count
    rope_theta: Real
    sequences_per_step: Count
    steps: tuple[Count, Count] = Field(strict=False)  # the first and last of the models that were scored

    def matches(self, training: Training) -> bool:
        """Return whether a run of ours was trained in this way."""
        source, *others = training.data.get("sources") or [{}]
        mixture, rope = training.data.get("mixture") or {}, training.rope
        ours = [training.sequence_length, rope.get("rope_type"), rope.get("rope_theta"), training.sequences_per_step]
        ours += [training.steps, mixture.get("shares")]
        published = [self.sequence_length, "default", self.rope_theta, self.sequences_per_step]
        whole = [source.get(name) or None for name in ("dataset", "split", "subset", "max_documents", "filters")]
        prefers_long = any(mixture.get(name) is not None for name in ("long_weight", "long_share"))
        return (
            self.dataset is not None
            and not others
            and whole == [self.dataset, "train", None, None, None]
            and ours == [*published, self.steps[1], self.shares]
            and (prefers_long if self.shares else not mixture)
        )


class PublishedTable(Section):
    """Rows of one kind of score: by variant for models that were trained alike, else by the model's name.

    `ruler_bases` has a row for each type and base of RoPE, and belongs to no run.
    """

    table: Count  # its number in the paper
    scores: Literal["ruler_11", "ruler_13", "ruler_tasks", "ruler_bases", "longbench", "short"]
    model: Name | None = None
    training: Name | None = None
    length: Count | None = None  # tokens of the prompts; for ruler_tasks alone
    columns: list[Name | Count] = Field(min_length=1)
    rows: dict[Name, list[Annotated[float, Field(ge=0, le=100)]]] = Field(min_length=1)


class Publication(Section):
    """The tables of a paper."""

    arxiv: Name
    version: Count
    models: dict[Name, Name | None]  # hub id by the paper's name of a model; null: none is named
    trainings: dict[Name, PublishedTraining]
    tables: list[PublishedTable] = Field(min_length=1)

    def row_of(
        self, table: PublishedTable, training: Training | None, source: str, steps: set[int | None]
    ) -> list[float]:
        """Return the row of a table that belongs to a run; []: none does.

        Args:
            table: of this paper.
            training: how the run was trained; None: not known, or a model as it was published.
            source: the run's model, a hub id or a folder.
            steps: of the checkpoints that were measured.
        """
        if table.training is None:
            named = [row for name, row in table.rows.items() if self.models.get(name) == source]
            return named[0] if named and training is None and steps == {None} else []
        published, model = self.trainings[table.training], self.models[table.model or ""]
        if training is None or model is None or training.model != model or not published.matches(training):
            return []
        variant = {*training.variant.split("+")}
        if "interleave" in variant and training.split != "authors":
            return []
        if not all(step is not None and published.steps[0] <= step <= published.steps[1] for step in steps):
            return []
        return next((row for name, row in table.rows.items() if {*name.split("+")} == variant), [])


def notes_of(published: Publication, trainings: list[Training | None]) -> list[str]:
    """Return what a table says below published numbers that stand next to runs of these trainings."""
    notes = [
        f"Published: arXiv {published.arxiv}v{published.version}, by transcriptions, of the same model, data, variant "
        "and length. It is in no mean and no interval.",
        _UNSAID,
    ]
    return notes + [_UNSAID_OF_SPLITS] * any(of is not None and "interleave" in of.variant for of in trainings)


def load_published(path: Path = PLACE) -> Publication:
    """Read published tables. Raises UserError as `anchorline.settings.load`."""
    return settings.load(Publication, path, example="version=2")


def published_scores(run: Measured, published: Publication) -> dict[Column, tuple[float, int]]:
    """Return the published scores that belong to a run, each with the number of its table.

    There are none, unless all its checkpoints were trained alike, and nothing stood before the prompts. RULER's scores
    need the tasks as they were in October 2024, and a haystack that is no demo text and is split as RULER's.
    """
    results = run.results()
    trainings = {result.training.model_dump_json() if result.training else "" for result in results}
    if len(trainings) != 1 or any(of.settings.anchor or of.identity.get("chat_template") for of in results):
        return {}
    haystacks = {result.identity.get("materials", {}).get("haystack") for result in results} - {None}
    other_haystack = any(name.startswith("demo ") or not name.endswith("sentences english") for name in haystacks)
    no_ruler = other_haystack or bool({*IN_2024.values()} & {*run.names()})
    known = results[0].training, results[0].source, {result.step for result in results}
    return {
        (table.scores, table.length, column): (score, table.table)
        for table in published.tables
        if not (no_ruler and table.scores.startswith("ruler")) and (row := published.row_of(table, *known))
        for column, score in zip(table.columns, row, strict=True)
    }
