"""What tasks are made of besides templates: text to hide needles in, questions with documents. Missing is an answer."""

import csv
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted
from anchorline.files import expand, read_file
from torchtrain.config import Source
from torchtrain.data.corpus import Document, read
from torchtrain.data.hub import dataset_items
from torchtrain.evaluation.question_sets import read_question_set
from torchtrain.evaluation.suite import NEEDS_HAYSTACK, Haystack, Published, QuestionSet, Suite, benchmark_of

_MOST_BYTES = 1 << 30  # of a text file, or of questions
_QUESTIONS = {"qa_1": ("squad", "SQuAD's dev-v2.0.json"), "qa_2": ("hotpotqa", "HotpotQA's distractor file")}


class MissingMaterialError(Exception):
    """A task cannot run for want of its material: says which setting names it."""


@dataclass(frozen=True)
class Materials:
    """The materials of a suite, each read when it is first asked for."""

    suite: Suite

    @cached_property
    def haystack(self) -> list[str]:
        """The haystack's words, in the order of its documents.

        Raises:
            MissingMaterialError: the suite names none.
            UserError: it cannot be read, or holds nothing.
        """
        if self.suite.haystack is None:
            raise MissingMaterialError("haystack is not set")
        words = [word for text in _texts(self.suite.haystack) for word in text.split()]
        if not words:
            raise UserError(f"haystack {quoted(self.suite.haystack.name)}: holds no text; give another")
        return words

    @cached_property
    def haystack_digest(self) -> str:
        """SHA-256 of the haystack's words."""
        return hashlib.sha256(" ".join(self.haystack).encode()).hexdigest()

    def questions(self, task: str) -> tuple[Any, str, str]:
        """Return a task's questions as the published JSON has them, what they are called, and a SHA-256 of them.

        Raises:
            MissingMaterialError: the suite names none.
            UserError: they cannot be read, or are not JSON or as the hub has them.
        """
        setting, what = _QUESTIONS[task]
        given = getattr(self.suite, setting)
        if given is None:
            raise MissingMaterialError(f"{setting} is not set ({what})")
        if isinstance(given, QuestionSet):
            if task not in self._sets:
                self._sets[task] = read_question_set(setting, given)
            published = self._sets[task]
            content = json.dumps(published, ensure_ascii=False).encode(errors="surrogatepass")
            return published, f"dataset {given.dataset}", hashlib.sha256(content).hexdigest()
        path = expand(given)
        try:
            content = read_file(path, _MOST_BYTES)
        except OSError as error:
            raise UserError(f"{setting} {quoted(path)}: {str(error.strerror).lower()}; give {what}") from None
        try:
            return json.loads(content), path.name, hashlib.sha256(content).hexdigest()
        except (ValueError, RecursionError):
            raise UserError(f"{setting} {quoted(path)}: is not JSON; give {what}") from None

    @cached_property
    def _sets(self) -> dict[str, Any]:
        return {}

    @cached_property
    def _tables(self) -> dict[str, "Questions"]:
        return {}

    def published(self, task: str) -> "Questions":
        """Return the questions of a task of LongBench, MMLU or HellaSwag.

        Raises:
            MissingMaterialError: the suite names no place, or the place lacks the task's file.
            UserError: what is there is not in the published layout.
        """
        if task not in self._tables:
            self._tables[task] = _read_published(task, getattr(self.suite, benchmark_of(task)))
        return self._tables[task]

    def identity(self, task: str) -> dict[str, str]:
        """Return what a task's samples depend on besides its generator: {} where that is nothing.

        Raises:
            MissingMaterialError, UserError: as above.
        """
        if task in NEEDS_HAYSTACK:
            digest = self.haystack_digest
            assert self.suite.haystack is not None
            return {"haystack": self.suite.haystack.name, "haystack_sha256": digest}
        if task in _QUESTIONS:
            _, name, digest = self.questions(task)
            return {"questions": name, "questions_sha256": digest}
        if benchmark_of(task) != "ruler":
            return {"questions_sha256": self.published(task).digest}
        return {}


@dataclass(frozen=True)
class Questions:
    """Questions of a published benchmark, and those that come solved before each (`shots`)."""

    questions: list[dict[str, Any]]
    shots: list[dict[str, Any]]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of their content."""
        content = json.dumps([self.questions, self.shots], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode()).hexdigest()


# Of a record, what is read: its name and the type of its value.
_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "longbench": {"input": str, "context": str, "answers": list, "all_classes": (list, type(None))},
    "mmlu": {"question": str, "choices": list, "answer": int},
    "hellaswag": {"activity_label": str, "ctx_a": str, "ctx_b": str, "endings": list, "label": (int, str)},
}
_OFFICIAL = {"longbench": "LongBench's data.zip", "mmlu": "MMLU's data.tar", "hellaswag": "HellaSwag's repository"}


def _read_published(task: str, place: Published | None) -> Questions:
    benchmark, _, name = task.partition("_")
    if place is None:
        raise MissingMaterialError(f"{benchmark} is not set (a folder of {_OFFICIAL[benchmark]}, or a dataset)")
    split, shots = {"longbench": ("test", None), "mmlu": ("test", "dev"), "hellaswag": ("validation", None)}[benchmark]
    if place.dataset is not None:

        def read_split(split: str) -> list[dict[str, Any]]:
            source = Source(dataset=place.dataset, subset=name or None, split=split, revision=place.revision)
            try:
                return [record for _, record in dataset_items(source)]
            except UserError as error:
                raise UserError(str(error).replace("data.sources", benchmark, 1)) from None

        found, where = [read_split(each) if each else [] for each in (split, shots)], quoted(place.dataset)
    else:
        assert place.folder is not None
        folder = expand(place.folder)
        names = {
            "longbench": [f"{name}.jsonl"],
            "mmlu": [f"test/{name}_test.csv", f"dev/{name}_dev.csv"],
            "hellaswag": ["hellaswag_val.jsonl"],
        }[benchmark]
        found, where = [_read_records(benchmark, folder, each) for each in names], quoted(place.folder)
    tables = [
        [_check_record(benchmark, f"{benchmark} {where}: {task}, record {i + 1}", each) for i, each in enumerate(table)]
        for table in found
    ]
    if not tables[0]:
        raise UserError(f"{benchmark} {where}: {task} has no questions; give those of {_OFFICIAL[benchmark]}")
    return Questions(tables[0], tables[1] if len(tables) > 1 else [])


def _read_records(benchmark: str, folder: Path, name: str) -> list[dict[str, Any]]:
    """Read a published file, which stands in the folder or in its `data`."""
    path = next((path for path in (folder / name, folder / "data" / name) if path.is_file()), None)
    if path is None:
        raise MissingMaterialError(f"{benchmark}.folder {quoted(folder)} has no {name} ({_OFFICIAL[benchmark]})")
    try:
        text = read_file(path, _MOST_BYTES).decode()
        if path.suffix == ".csv":
            rows = list(csv.reader(io.StringIO(text, newline="")))
            letters = list("ABCD")
            return [{"question": row[0], "choices": row[1:5], "answer": letters.index(row[5])} for row in rows]
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except OSError as error:
        raise UserError(f"{benchmark}.folder: {quoted(path)}: {str(error.strerror).lower()}; copy it again") from None
    except (ValueError, LookupError, RecursionError, csv.Error):
        raise UserError(
            f"{benchmark}.folder: {quoted(path)}: is damaged; copy it again from {_OFFICIAL[benchmark]}"
        ) from None


def _check_record(benchmark: str, where: str, record: Any) -> dict[str, Any]:
    """Return what is read of a record. A copy of LongBench on the hub calls its `input` `question`."""
    if benchmark == "longbench" and isinstance(record, dict) and "input" not in record:
        record = record | {"input": record.get("question")}
    fields = _FIELDS[benchmark]
    for name, kind in fields.items():
        value = record.get(name) if isinstance(record, dict) else None
        empty = isinstance(value, Sequence) and not isinstance(value, str) and not value and name != "all_classes"
        if not isinstance(value, kind) or empty:
            raise UserError(f"{where}: has no {name} as the published file has; give {_OFFICIAL[benchmark]}")
    kept = {name: record[name] for name in fields}
    number = {"mmlu": "answer", "hellaswag": "label"}.get(benchmark)
    choices = {"mmlu": "choices", "hellaswag": "endings"}.get(benchmark)
    if number and choices:
        right = str(kept[number])
        if not right.isascii() or not right.isdecimal() or int(right) >= len(kept[choices]) or len(kept[choices]) != 4:
            raise UserError(
                f"{where}: {number} {quoted(right)} names none of four {choices}; give {_OFFICIAL[benchmark]}"
            )
        kept[number] = int(right)
    return kept


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
    source = Source(
        demo=haystack.demo,
        files=haystack.files,
        dataset=haystack.dataset,
        split=haystack.split,
        text_field=haystack.text_field,
    )
    for record in read(source):
        if isinstance(record, Document):
            yield record.text
