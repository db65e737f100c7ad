"""What RULER's tasks are made of: text to hide needles in, and questions with documents."""

import hashlib
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted
from anchorline.files import expand, read_file
from torchtrain.config import Source
from torchtrain.data.corpus import Document, read
from torchtrain.evaluation.suite import Suite

_NEEDS_HAYSTACK = ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
_QUESTIONS = {"qa_1": ("squad", "SQuAD's dev-v2.0.json"), "qa_2": ("hotpotqa", "HotpotQA's distractor file")}
_MOST_BYTES = 1 << 30


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
        """The haystack's words, in order. Raises CannotRunError: none is named. Raises UserError: it holds nothing."""
        haystack = self.suite.haystack
        if haystack is None:
            raise CannotRunError("haystack is not set")
        source = Source.model_validate(haystack.model_dump(exclude={"sentences"}))
        words = [word for record in read(source) if isinstance(record, Document) for word in record.text.split()]
        if not words:
            raise UserError(f"haystack {quoted(haystack.name)}: holds no text; give another")
        return words

    def questions(self, task: str) -> tuple[Any, str, str]:
        """Return a task's questions as the published JSON has them, the file's name, and its SHA-256. Raises
        CannotRunError: the suite names none. Raises UserError: they cannot be read, or are not JSON.
        """
        setting, what = _QUESTIONS[task]
        if (file := getattr(self.suite, setting)) is None:
            raise CannotRunError(f"{setting} is not set ({what})")
        return _read_questions(setting, what, expand(file))

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
def _read_questions(setting: str, what: str, path: Path) -> tuple[Any, str, str]:
    try:
        content = read_file(path, _MOST_BYTES)
        return json.loads(content), path.name, hashlib.sha256(content).hexdigest()
    except OSError as error:
        raise UserError(f"{setting} {quoted(path)}: {str(error.strerror).lower()}; give {what}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{setting} {quoted(path)}: is not JSON; give {what}") from None
