"""What tasks are made of besides templates: text to hide needles in, questions with documents. Missing is an answer."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from anchorline.errors import UserError, quoted
from anchorline.files import expand, read_file
from torchtrain.config import Source
from torchtrain.data.corpus import Document, read
from torchtrain.evaluation.suite import NEEDS_HAYSTACK, Haystack, Suite

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

    def questions(self, task: str) -> tuple[Path, str]:
        """Return the file of a task's questions and the SHA-256 of its content.

        Raises:
            MissingMaterialError: the suite names none.
            UserError: it cannot be read or is not JSON.
        """
        setting, what = _QUESTIONS[task]
        given = getattr(self.suite, setting)
        if given is None:
            raise MissingMaterialError(f"{setting} is not set ({what})")
        path = expand(given)
        try:
            content = read_file(path, _MOST_BYTES)
        except OSError as error:
            raise UserError(f"{setting} {quoted(path)}: {str(error.strerror).lower()}; give {what}") from None
        try:
            json.loads(content)
        except (ValueError, RecursionError):
            raise UserError(f"{setting} {quoted(path)}: is not JSON; give {what}") from None
        return path, hashlib.sha256(content).hexdigest()

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
            path, digest = self.questions(task)
            return {"questions": path.name, "questions_sha256": digest}
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


def read_questions(path: Path) -> Any:
    """Return the JSON of a file of questions: of SQuAD an object, of HotpotQA a list."""
    return json.loads(read_file(path, _MOST_BYTES))
