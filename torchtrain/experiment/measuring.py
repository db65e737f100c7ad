"""What a trained model of an experiment does: its loss by position, and what it copies over a distance.

Both are taken in float32 with plain causal attention, the anchor in front: what the training left behind is seen, and
not the arithmetic in which the model would be served. Of a model trained in float32 the loss is taken again with its
weights rounded to bfloat16, which is what saving does to the others.

    python -m torchtrain.experiment.measuring EXPERIMENT.yaml ROWS.json MODEL OUT.json

Legend: T tokens of a row.
"""

import datetime
import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ConfigDict

from anchorline.environment import processor, versions
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_file, replace_file
from torchtrain.config import Config
from torchtrain.data import anchor_ids
from torchtrain.data.encode import Encoder
from torchtrain.experiment.spec import MeasureConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

_MOST_BYTES = 1 << 26
_Kind = TypeVar("_Kind", bound=BaseModel)


class Measurement(BaseModel):
    """Losses in nats a token, of one model: a row of numbers for each document, in an order that all models share."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    date: str
    environment: str  # processor and versions
    bands: list[tuple[int, int]]  # positions, the last excluded
    distances: list[int]
    domains: list[str]  # of each document
    documents: str  # SHA-256 of the token ids that were measured
    losses: list[list[float]]  # [documents][bands]
    copies: list[list[float]]  # [documents][distances], of the second time a passage stands there
    passages: list[float]  # [documents], of the first time
    rounded: list[list[float]] | None  # losses again, of weights rounded to bfloat16

    def fault(self, measure: MeasureConfig) -> str | None:
        """Return in what it is not what `measure` asks for; None: it is."""
        if (self.bands, self.distances) != (measure.edges, measure.distances):
            return "other bands or distances"
        shapes = [(self.losses, len(self.bands)), (self.copies, len(self.distances))]
        shapes += [] if self.rounded is None else [(self.rounded, len(self.bands))]
        rows = [table for table, _ in shapes] + [self.passages, self.domains]
        if any(len(table) != measure.documents for table in rows):
            return f"not {measure.documents} documents"
        return None if all(len(row) == width for table, width in shapes for row in table) else "rows of other lengths"


class MeasuredRows(BaseModel):
    """Token ids that every model of an experiment is given."""

    documents: list[list[int]]
    copies: list[list[list[int]]]  # [documents][distances]
    domains: list[str]

    @property
    def digest(self) -> str:
        """SHA-256 of the ids."""
        return hashlib.sha256(repr((self.documents, self.copies)).encode()).hexdigest()


def make_rows(
    texts: Sequence[tuple[str, str]],
    tokenizer: "PreTrainedTokenizerFast",
    run: Config,
    measure: MeasureConfig,
) -> MeasuredRows:
    """Return the rows of `measure.documents` documents, taken from all domains in turn.

    A row for copies is the anchor, a passage of the next document, as much of this document as the distance asks for,
    and the passage again.

    Args:
        texts: (domain, text) of each document.
        tokenizer: the models'.
        run: one of the runs', which says what opens a row and what a special token in a text is.
        measure: what is asked.

    Raises:
        UserError: too few documents are long enough.
    """
    anchor = anchor_ids(tokenizer, run.pack)
    room = measure.tokens - len(anchor)
    long: dict[str, list[list[int]]] = {}
    encoded = Encoder(tokenizer, run.data.special_tokens).encode([text for _, text in texts])
    for (domain, _), ids in zip(texts, encoded, strict=True):
        if len(ids) > measure.tokens:
            long.setdefault(domain, []).append(ids.tolist())
    chosen = [(domain, ids) for domain, ids in _in_turn(long)][: measure.documents]
    if len(chosen) < measure.documents:
        raise UserError(
            f"measure.documents: {len(chosen)} documents hold more than {measure.tokens:,} tokens, fewer than the "
            f"{measure.documents} asked for; ask for fewer, or raise corpus.measured_share"
        )
    copies = []
    for number, (_, ids) in enumerate(chosen):
        passage = chosen[(number + 1) % len(chosen)][1][-measure.passage :]
        copies.append(
            [[*anchor, *passage, *ids[: distance - len(passage)], *passage] for distance in measure.distances]
        )
    documents = [[*anchor, *ids[:room]] for _, ids in chosen]
    return MeasuredRows(documents=documents, copies=copies, domains=[domain for domain, _ in chosen])


def measure_model(
    model: "PreTrainedModel", rows: MeasuredRows, measure: MeasureConfig, again_rounded: bool
) -> Measurement:
    """Measure a model that is loaded in float32.

    Args:
        model: in evaluation mode; its weights are rounded here if `again_rounded`.
        rows: what it is given.
        measure: what is asked.
        again_rounded: whether its weights were saved in float32.
    """
    import torch

    from torchtrain.evaluation.perplexity import document_losses

    bands = measure.edges

    def by_band() -> list[list[float]]:
        found = [document_losses(model, ids).double() for ids in rows.documents]  # [T - 1], from the second token on
        return [[float(losses[first - 1 : end - 1].mean()) for first, end in bands] for losses in found]

    copies, passages = [], []
    for of_document in rows.copies:
        found = [document_losses(model, ids).double() for ids in of_document]
        # The first token of the copy is the one that tells that it begins.
        copies.append([float(losses[-(measure.passage - 1) :].mean()) for losses in found])
        front = len(of_document[0]) - measure.distances[0] - measure.passage
        passages.append(float(found[0][front : front + measure.passage - 1].mean()))
    losses, rounded = by_band(), None
    if again_rounded:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))
        rounded = by_band()
    found_here = versions(("torch", "transformers"))
    return Measurement(
        date=datetime.date.today().isoformat(),
        environment=", ".join([processor(), *(f"{name} {number}" for name, number in found_here.items())]),
        bands=bands,
        distances=measure.distances,
        domains=rows.domains,
        documents=rows.digest,
        losses=losses,
        copies=copies,
        passages=passages,
        rounded=rounded,
    )


def read_measurement(path: Path) -> Measurement:
    """Read what `main` wrote. Raises UserError: the file is damaged."""
    return _read(Measurement, path)


def read_rows(path: Path) -> MeasuredRows:
    """Read the rows that `torchtrain.experiment.running` wrote. Raises UserError: the file is damaged."""
    return _read(MeasuredRows, path)


def _read(kind: type[_Kind], path: Path) -> _Kind:
    try:
        return kind.model_validate_json(read_file(path, _MOST_BYTES))
    except ValueError as error:
        raise UserError(
            f"{quoted(path)}: is damaged ({quoted_reason(error)}); remove it, and it is made again"
        ) from None


def main(experiment: Path, rows: Path, model: Path, out: Path) -> None:
    """Measure one model; see the top of the file."""
    import torch
    from transformers.utils import logging

    from torchtrain.experiment.spec import load_experiment
    from torchtrain.modeling.load import load_for_evaluation
    from torchtrain.modeling.source import open_config

    logging.disable_progress_bar()
    measure = load_experiment(experiment).measure
    saved_wide = getattr(open_config(str(model)), "dtype", None) == torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = load_for_evaluation(str(model), dtype=torch.float32, device=device)
    found = measure_model(loaded, read_rows(rows), measure, saved_wide)
    out.parent.mkdir(parents=True, exist_ok=True)
    replace_file(out, found.model_dump_json().encode())


def _in_turn(by_domain: dict[str, list[list[int]]]) -> Iterator[tuple[str, list[int]]]:
    most = max(map(len, by_domain.values()), default=0)
    for place in range(most):
        for domain, documents in by_domain.items():
            if place < len(documents):
                yield domain, documents[place]


if __name__ == "__main__":
    try:
        main(*map(Path, sys.argv[1:]))
    except UserError as error:
        sys.exit(str(error))
