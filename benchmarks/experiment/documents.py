"""Write the documents of an experiment, and make the rows in which it is measured.

What a document says is a task's (`facts`, `offsets`). A document opens with a word of filler, or with BOS in its place:
so the same documents, of the same lengths, come with a BOS each or without.

Legend: N rows · T tokens of a row · K queries of all rows · M right answers of a query.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from anchorline.errors import UserError
from anchorline.files import replace_file
from benchmarks.experiment import facts, offsets
from benchmarks.experiment.spec import FactsConfig, StageConfig, Task, TrainingExperiment
from benchmarks.experiment.words import BOS, FIRST_FILLER, chain_of, vocabulary
from torchtrain.config import Config
from torchtrain.data.packing import PackPlan
from torchtrain.data.streams import HELD_OUT, random_stream

_DOCUMENTS, _ROWS = 1, 2  # what a random stream is for


@dataclass(frozen=True)
class Rows:
    """Rows of one document each, and their queries in rising order of distance."""

    input_ids: np.ndarray  # int64 [N, T]
    row: np.ndarray  # int64 [K]
    place: np.ndarray  # int64 [K], of the word whose next word is asked for
    distance: np.ndarray  # int64 [K], tokens from what tells the answer to the answer
    answers: np.ndarray  # int64 [K, M], each as right as the others

    def without_bos(self) -> "Rows":
        """Return the same rows with a word of filler where each has its BOS."""
        ids_NT = self.input_ids.copy()
        ids_NT[:, 0] = FIRST_FILLER
        return replace(self, input_ids=ids_NT)


def write_documents(task: Task, stage: StageConfig, key: Sequence[int], path: Path, config: Config | None) -> None:
    """Write a stage's documents, a line of JSON each: into `path`, and into its `with_bos` with BOS as first words.

    stage: the lengths of the documents, and the number of all tokens.
    key: other documents for each.
    config: of the run that reads them, if documents of a row may share no key.
    """
    random = random_stream(task.seed, _DOCUMENTS, *key)
    low, high = np.log(stage.documents[0]), np.log(stage.documents[1] + 1)
    lengths = list[int]()
    while sum(lengths) < stage.corpus_tokens:
        full = random.random() < stage.full_share
        lengths.append(stage.row_tokens - 2 if full else int(np.exp(random.uniform(low, high))))
    keys: list[np.ndarray] | None = None
    if config is not None and isinstance(task, FactsConfig):
        keys = draw_keys(task, random, len(lengths), neighbours_of(np.array(lengths), config))
    words, chain = np.array(vocabulary(task)), chain_of(task)
    lines = list[list[str]]()
    for number, length in enumerate(lengths):
        if isinstance(task, FactsConfig):
            ids = facts.draw(task, chain, random, length, None if keys is None else keys[number])
        else:
            ids, _ = offsets.draw(task, chain, random, length)
        lines.append(words[ids].tolist())
    path.parent.mkdir(parents=True, exist_ok=True)
    for file, openers in ((with_bos(path), [BOS]), (path, [])):
        texts = (" ".join([*openers, *line[len(openers) :]]) for line in lines)
        replace_file(file, "".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def with_bos(path: Path) -> Path:
    """Return the file of the same documents, each of which opens with BOS."""
    return path.with_stem(f"{path.stem}-bos")


def neighbours_of(lengths: np.ndarray, config: Config) -> list[set[int]]:
    """Return for each document which others are in a row with it, in the first epoch, with a tag of a token or without.

    lengths: int [n], tokens of each document.
    config: of the run; its packing and held-out documents are computed by the trainer's own planner.
    """
    seed, n = config.run.seed, len(lengths)
    held = random_stream(seed, HELD_OUT, 0).permutation(n)[: max(1, round(config.data.held_out_share * n))]
    kept = np.setdiff1d(np.arange(n), held)
    found: list[set[int]] = [set() for _ in range(n)]
    for tag in (0, 1):
        capacity, overhead = config.pack.sequence_length - 1, np.full(len(kept), tag)
        plan = PackPlan(lengths[kept], capacity, overhead, seed, last=config.pack.last, strategy=config.pack.strategy)
        for row in range(len(plan)):
            together = {int(kept[span.document_index]) for span in plan.spans(row)}
            for one in together:
                found[one] |= together - {one}
    return found


def draw_keys(
    task: FactsConfig, random: np.random.Generator, n: int, neighbours: Sequence[set[int]]
) -> list[np.ndarray]:
    """Return the keys of each document, int [keys_each]: none that a neighbour has.

    Raises UserError: a hundred draws left a document too few, so many neighbours it has.
    """
    order = sorted(range(n), key=lambda one: -len(neighbours[one]))  # those with the least choice first
    for _ in range(100):
        drawn = dict[int, np.ndarray]()
        for one in order:
            taken = [drawn[other] for other in sorted(neighbours[one]) if other in drawn]
            free = np.setdiff1d(np.arange(task.keys), np.concatenate([[-1], *taken]))
            if len(free) < task.keys_each:
                break
            drawn[one] = random.choice(free, task.keys_each, replace=False)
        else:
            return [drawn[one] for one in range(n)]
    raise UserError(
        f"task.keys {task.keys}: the documents of a row share none, and {task.keys_each} each are too many; take more "
        "keys, or longer documents"
    )


def make_rows(experiment: TrainingExperiment, tokens: int, distances: Sequence[int], rows: int) -> Rows:
    """Return rows of one document each after a BOS, with questions of every distance.

    tokens: T.
    rows: N.
    """
    task, random = experiment.task, random_stream(experiment.task.seed, _ROWS, tokens)
    ids, asked = list[np.ndarray](), list[tuple[int, int, int, list[int]]]()
    for row in range(rows):
        if isinstance(task, FactsConfig):
            document, queries = facts.draw_row(task, random, tokens - 1, distances, experiment.measure.queries)
        else:
            document, queries = offsets.draw_row(task, random, tokens - 1, distances, experiment.measure.queries)
        ids.append(np.concatenate([[0], document]))
        asked += [(distance, row, place + 1, answers) for place, distance, answers in queries]
    asked.sort(key=lambda query: query[:3])
    distance, row, place, answers = (np.array(column, dtype=np.int64) for column in zip(*asked, strict=True))
    return Rows(np.array(ids, dtype=np.int64), row, place, distance, answers)
