"""What tasks are made of: text to hide needles in, questions with documents, and published files of benchmarks."""

import csv
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted
from anchorline.files import expand, read_file
from torchtrain.config import Source
from torchtrain.data.corpus import Document, read
from torchtrain.evaluation.suite import Suite

_NEEDS_HAYSTACK = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
_QUESTIONS = {"qa_1": ("squad", "SQuAD's dev-v2.0.json"), "qa_2": ("hotpotqa", "HotpotQA's distractor file")}
_MOST_BYTES = 1 << 30  # of questions, or of a benchmark's file
# The published files of a task by its splits, and a pattern that tells whether a folder holds such files.
_PUBLISHED = {
    "longbench": ({"test": "{}.jsonl"}, "*.jsonl"),
    "mmlu": ({"test": "test/{}_test.csv", "dev": "dev/{}_dev.csv"}, "test/*_test.csv"),
    "hellaswag": ({"validation": "hellaswag_val.jsonl"}, "hellaswag_val.jsonl"),
}


class CannotRunError(Exception):
    """A task cannot run: its material is missing, or the length leaves no room. The message is the reason."""


@contextmanager
def quiet_library() -> Iterator[None]:
    """Let lm-eval and datasets report nothing but errors."""
    logs = {log: log.level for log in map(logging.getLogger, ("lm_eval", "datasets"))}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that lm-eval scores with
            for log in logs:
                log.setLevel(logging.ERROR)
            yield
    finally:
        for log, level in logs.items():
            log.setLevel(level)


@dataclass(frozen=True)
class Materials:
    """The materials of RULER's tasks. Each is read when it is first needed."""

    suite: Suite

    @cached_property
    def haystack(self) -> list[str]:
        """The haystack's words, in the order of its documents.

        Raises:
            CannotRunError: the suite names none.
            UserError: it cannot be read, or holds nothing.
        """
        haystack = self.suite.haystack
        if haystack is None:
            raise CannotRunError("haystack is not set")
        source = Source.model_validate(haystack.model_dump(exclude={"sentences"}))
        words = [word for record in read(source) if isinstance(record, Document) for word in record.text.split()]
        if not words:
            raise UserError(f"haystack {quoted(haystack.name)}: holds no text; give another")
        return words

    def questions(self, task: str) -> tuple[Any, str, str]:
        """Return a task's questions as the published JSON has them, the file's name, and its SHA-256.

        Raises:
            CannotRunError: the suite names none.
            UserError: they cannot be read, or are not JSON.
        """
        setting, what = _QUESTIONS[task]
        path = getattr(self.suite, setting)
        if path is None:
            raise CannotRunError(f"{setting} is not set ({what})")
        return _read_questions(setting, what, path)

    def identity(self, task: str) -> dict[str, str]:
        """Return what a task's samples depend on besides its generator; {}: nothing. Raises as the above."""
        if task in _NEEDS_HAYSTACK:
            digest = hashlib.sha256(" ".join(self.haystack).encode()).hexdigest()
            assert self.suite.haystack is not None
            return {"haystack": self.suite.haystack.name, "haystack_sha256": digest}
        if task in _QUESTIONS:
            _, name, digest = self.questions(task)
            return {"questions": name, "questions_sha256": digest}
        return {}


@cache
def _read_questions(setting: str, what: str, file: str) -> tuple[Any, str, str]:
    path = expand(file)
    try:
        content = read_file(path, _MOST_BYTES)
        return json.loads(content), path.name, hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise UserError(f"{setting} {quoted(path)}: {str(error.strerror).lower()}; give {what}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{setting} {quoted(path)}: is not JSON; give {what}") from None


def local_data(task: str, setting: str, folder: Path, stem: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a task that make lm-eval read a folder: a benchmark's published files, or a data set as
    the hub has it.

    Args:
        task: its name, for messages.
        setting: `longbench`, `mmlu`, `hellaswag`, or anything else.
        folder: of the files, which may also lie in its subfolder `data`.
        stem: name of the task's YAML file: `mmlu_anatomy`, `qasper`.
        kwargs: the task's `dataset_kwargs`.

    Raises:
        CannotRunError: the folder has files of the benchmark, but not this task's.
    """
    patterns, sign = _PUBLISHED.get(setting, ({}, ""))
    places = [place for place in (folder, folder / "data") if sign and any(place.glob(sign))]
    if not places:
        given = kwargs.get("data_files")
        if isinstance(given, dict) and all(str(file).startswith("hf://datasets/") for file in given.values()):
            # hf://datasets/OWNER/NAME/FILE: the task asks for files of the hub, whatever its dataset_path is.
            local = {split: str(folder / file.split("/", 5)[5]) for split, file in given.items()}
            return {"dataset_kwargs": {**kwargs, "data_files": local}}
        return {"dataset_path": str(folder)}
    files = {split: pattern.format(stem.removeprefix(f"{setting}_")) for split, pattern in patterns.items()}
    place = next((place for place in places if all((place / file).is_file() for file in files.values())), None)
    if place is None:
        raise CannotRunError(f"data.{setting} {quoted(folder)} has no {' and '.join(files.values())}")
    load = partial(_read_published, task, {split: place / file for split, file in files.items()})
    lacks = {"training_split": None} if setting == "hellaswag" else {}
    return {"custom_dataset": load, "dataset_path": "", "dataset_name": None, "metadata": {}, **lacks}


def _read_published(task: str, files: dict[str, Path], **_: Any) -> dict[str, Any]:
    import datasets

    splits = {}
    for split, path in files.items():
        try:
            text = read_file(path, _MOST_BYTES).decode()
            if path.suffix == ".csv":
                rows = csv.reader(io.StringIO(text, newline=""))
                records = [{"question": of[0], "choices": of[1:5], "answer": "ABCD".index(of[5])} for of in rows]
            else:
                records = [json.loads(line) for line in text.split("\n") if line.strip()]
            if "longbench" in task:  # lm-eval's copy on the hub calls `input` `question`
                records = [{"question": record["input"], **record} for record in records]
        except (OSError, ValueError, LookupError, RecursionError, csv.Error, TypeError):
            raise UserError(f"{task}: {quoted(path)} is damaged, or not the published file; copy it again") from None
        splits[split] = datasets.Dataset.from_list(records)
    return splits
