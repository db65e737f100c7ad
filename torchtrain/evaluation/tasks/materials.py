"""What tasks are made of: text to hide needles in, questions with documents, local files of published benchmarks."""

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted
from anchorline.files import expand, read_file
from torchtrain.config import Source
from torchtrain.data.corpus import Document, read
from torchtrain.data.hub import dataset_items
from torchtrain.evaluation.suite import Haystack, QuestionSet, Suite

NEEDS_HAYSTACK = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
_MOST_BYTES = 1 << 30  # of a text file, or of questions
_QUESTIONS = {"qa_1": ("squad", "SQuAD's dev-v2.0.json"), "qa_2": ("hotpotqa", "HotpotQA's distractor file")}


class CannotRunError(Exception):
    """A task cannot run: its material is missing, or the length leaves no room. The message is the reason."""


@dataclass(frozen=True)
class Materials:
    """The materials of RULER's tasks, each read when it is first asked for."""

    suite: Suite

    @cached_property
    def haystack(self) -> list[str]:
        """The haystack's words, in the order of its documents.

        Raises:
            CannotRunError: the suite names none.
            UserError: it cannot be read, or holds nothing.
        """
        if self.suite.haystack is None:
            raise CannotRunError("haystack is not set")
        words = [word for text in _texts(self.suite.haystack) for word in text.split()]
        if not words:
            raise UserError(f"haystack {quoted(self.suite.haystack.name)}: holds no text; give another")
        return words

    @cached_property
    def _questions(self) -> dict[str, tuple[Any, str, str]]:
        return {}

    def questions(self, task: str) -> tuple[Any, str, str]:
        """Return a task's questions as the published JSON has them, their name, and their SHA-256.

        Raises:
            CannotRunError: the suite names none.
            UserError: they cannot be read, or are not JSON or as the hub has them.
        """
        setting, what = _QUESTIONS[task]
        given = getattr(self.suite, setting)
        if given is None:
            raise CannotRunError(f"{setting} is not set ({what})")
        if task not in self._questions:
            self._questions[task] = _read_questions(setting, what, given)
        return self._questions[task]

    def identity(self, task: str) -> dict[str, str]:
        """Return what a task's samples depend on besides its generator; {}: nothing.

        Raises:
            CannotRunError, UserError: as above.
        """
        if task in NEEDS_HAYSTACK:
            digest = hashlib.sha256(" ".join(self.haystack).encode()).hexdigest()
            assert self.suite.haystack is not None
            return {"haystack": self.suite.haystack.name, "haystack_sha256": digest}
        if task in _QUESTIONS:
            _, name, digest = self.questions(task)
            return {"questions": name, "questions_sha256": digest}
        return {}


def _texts(haystack: Haystack) -> Iterator[str]:
    if haystack.folder is not None:
        folder = expand(haystack.folder)
        paths = sorted(path for path in folder.rglob("*.txt") if path.is_file()) if folder.is_dir() else []
        if not paths:
            raise UserError(f"haystack.folder {quoted(folder)}: holds no .txt file; give a folder of text")
        for path in paths:
            try:
                yield read_file(path, _MOST_BYTES).decode()
            except (OSError, UnicodeDecodeError):
                raise UserError(
                    f"haystack.folder: {quoted(path)}: is not text in UTF-8; remove or convert it"
                ) from None
        return
    source = Source.model_validate(haystack.model_dump(exclude={"folder", "sentences"}, exclude_none=True))
    yield from (record.text for record in read(source) if isinstance(record, Document))


def _read_questions(setting: str, what: str, given: str | QuestionSet) -> tuple[Any, str, str]:
    if isinstance(given, QuestionSet):
        published = _from_hub(setting, given)
        content = json.dumps(published, ensure_ascii=False).encode(errors="surrogatepass")
        return published, f"dataset {given.dataset}", hashlib.sha256(content).hexdigest()
    path = expand(given)
    try:
        content = read_file(path, _MOST_BYTES)
        return json.loads(content), path.name, hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise UserError(f"{setting} {quoted(path)}: {str(error.strerror).lower()}; give {what}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{setting} {quoted(path)}: is not JSON; give {what}") from None


def _from_hub(setting: str, given: QuestionSet) -> Any:
    """Return the hub's rows in the layout of the published file: rows with one title and context are one paragraph."""
    subset = given.subset
    if setting == "hotpotqa" and subset is None and not Path(given.dataset).is_dir():
        subset = "distractor"
    source = Source(dataset=given.dataset, subset=subset, split=given.split, revision=given.revision)
    try:
        rows: list[Any] = [row for _, row in dataset_items(source)]
    except UserError as error:
        raise UserError(str(error).replace("data.sources", setting, 1)) from None
    try:
        if setting == "hotpotqa":
            return [
                {
                    "question": row["question"],
                    "answer": row["answer"],
                    "context": [
                        list(of) for of in zip(row["context"]["title"], row["context"]["sentences"], strict=True)
                    ],
                }
                for row in rows
            ]
        return {"data": [{"paragraphs": list(_paragraphs(of))} for _, of in groupby(rows, lambda row: row["title"])]}
    except (KeyError, TypeError, ValueError) as error:
        hub = {"squad": "rajpurkar/squad_v2", "hotpotqa": "hotpotqa/hotpot_qa"}[setting]
        raise UserError(
            f"{setting} {quoted(given.dataset)}: a row is not as {hub} has it ({error}); give that"
        ) from None


def _paragraphs(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for context, of_context in groupby(rows, key=lambda row: row["context"]):
        asked = [
            {
                "question": row["question"],
                "answers": [{"text": text} for text in row["answers"]["text"]],
                "is_impossible": not row["answers"]["text"],
            }
            for row in of_context
        ]
        yield {"context": context, "qas": asked}


def local_data(task: str, setting: str, folder: Path, stem: str) -> Callable[..., dict[str, Any]] | None:
    """Return what loads a task from a benchmark's published files; None: the folder is a data set as the hub has it.

    Args:
        task: its name, for messages.
        setting: `longbench`, `mmlu`, `hellaswag`, or anything else.
        folder: of the files: `NAME.jsonl`, `test/NAME_test.csv` and `dev/NAME_dev.csv`, or `hellaswag_val.jsonl`, also
            in its subfolder `data`.
        stem: name of the task's YAML file: `mmlu_anatomy`, `qasper`.

    Raises:
        CannotRunError: files of the benchmark are there, and this task's are not.
    """
    name = stem.removeprefix(f"{setting}_")
    wanted = {
        "longbench": {"test": f"{name}.jsonl"},
        "mmlu": {"test": f"test/{name}_test.csv", "dev": f"dev/{name}_dev.csv"},
        "hellaswag": {"validation": "hellaswag_val.jsonl"},
    }.get(setting, {})
    kinds = {"longbench": "*.jsonl", "mmlu": "test/*_test.csv", "hellaswag": "hellaswag_val.jsonl"}
    places = [place for place in (folder, folder / "data") if setting in kinds and any(place.glob(kinds[setting]))]
    if not places:
        return None
    place = next((place for place in places if all((place / file).is_file() for file in wanted.values())), None)
    if place is None:
        raise CannotRunError(f"data.{setting} {quoted(folder)} has no {' and '.join(wanted.values())}")

    def load(**_: Any) -> dict[str, Any]:
        import datasets

        return {split: datasets.Dataset.from_list(_records(task, place / file)) for split, file in wanted.items()}

    return load


def _records(task: str, path: Path) -> list[dict[str, Any]]:
    try:
        text = read_file(path, _MOST_BYTES).decode()
        if path.suffix == ".csv":
            rows = list(csv.reader(io.StringIO(text, newline="")))
            found = [{"question": row[0], "choices": row[1:5], "answer": "ABCD".index(row[5])} for row in rows]
        else:
            found = [json.loads(line) for line in text.split("\n") if line.strip()]
        if "longbench" in task:  # lm-eval's copy on the hub calls `input` `question`
            found = [{"question": record["input"]} | record for record in found]
        assert all(isinstance(record, dict) for record in found)
        assert found
    except (OSError, ValueError, LookupError, RecursionError, csv.Error, TypeError, AssertionError):
        raise UserError(f"{task}: {quoted(path)} is damaged, or not the published file; copy it again") from None
    return found
