"""SQuAD and HotpotQA as the hub has them, turned back into the layout of the published files.

A row of the hub is a question; the published files hold a SQuAD article with its paragraphs, and those with their
questions. Rows stand in the order of the file, so that what follows each other with one title, and one context, is one.
RULER's samples are then those of the published file; but that a paragraph without a question is in no row, and two
alike one after the other are one (dev-v2.0.json is not known to have either).
"""

import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from anchorline.errors import UserError, quoted
from torchtrain.config import Source
from torchtrain.data.hub import dataset_items
from torchtrain.evaluation.suite import QuestionSet

_HUB = {"squad": "rajpurkar/squad_v2", "hotpotqa": "hotpotqa/hotpot_qa"}
_EMPTY = "answer that is not empty"


def read_question_set(setting: str, given: QuestionSet) -> Any:
    """Return a data set's questions as the published JSON has them: of SQuAD an object, of HotpotQA a list.

    Args:
        setting: `squad` or `hotpotqa`.
        given: where they are.

    Raises:
        UserError: it cannot be read, is empty, or a row is not as the hub has it.
    """
    subset = given.subset
    if setting == "hotpotqa" and subset is None and not os.path.isdir(given.dataset):
        subset = "distractor"  # which the hub's has beside `fullwiki`
    source = Source(dataset=given.dataset, subset=subset, split=given.split, revision=given.revision)
    try:
        rows = [row for _, row in dataset_items(source)]
    except UserError as error:
        raise UserError(str(error).replace("data.sources", setting, 1)) from None
    where = f"{setting} {quoted(given.dataset)}"
    if not rows:
        raise UserError(f"{where}: its split {given.split} has no questions; give {_HUB[setting]}")
    for number, row in enumerate(rows, start=1):
        if wrong := next(_wrong_fields(setting, row), None):
            said = f"has no {wrong} as {_HUB[setting]} has; give that"
            if wrong == _EMPTY:
                said = f"has an empty answer; give the rows of {_HUB[setting]}"
            raise UserError(f"{where}: record {number}: {said}")
    return _squad(rows) if setting == "squad" else _hotpotqa(rows)


def _wrong_fields(setting: str, row: Any) -> Iterator[str]:
    """Yield what of a row is not as the hub has it."""
    held: Mapping[str, Any] = row if isinstance(row, dict) else {}
    texts = ("title", "context", "question") if setting == "squad" else ("question", "answer")
    yield from (name for name in texts if not isinstance(held.get(name), str))
    if setting == "hotpotqa" and isinstance(held.get("answer"), str) and not held["answer"].strip():
        yield _EMPTY
    of = held.get("answers" if setting == "squad" else "context")
    parts: Mapping[str, Any] = of if isinstance(of, dict) else {}
    if setting == "squad":
        if not _are_texts(parts.get("text")):
            yield "answers.text"
        elif not all(text.strip() for text in parts["text"]):
            yield _EMPTY
        return
    titles, sentences = parts.get("title"), parts.get("sentences")
    if not _are_texts(titles):
        yield "context.title"
    if not isinstance(sentences, list) or not all(map(_are_texts, sentences)):
        yield "context.sentences"
    elif isinstance(titles, list) and len(titles) != len(sentences):
        yield "context.sentences for each title"


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(of, str) for of in value)


def _squad(rows: list[dict[str, Any]]) -> dict[str, Any]:
    articles = []
    for title, of_title in groupby(rows, key=lambda row: row["title"]):
        paragraphs = []
        for context, of_context in groupby(of_title, key=lambda row: row["context"]):
            questions = [
                {
                    "question": row["question"],
                    "answers": [{"text": text} for text in row["answers"]["text"]],
                    "is_impossible": not row["answers"]["text"],
                }
                for row in of_context
            ]
            paragraphs.append({"context": context, "qas": questions})
        articles.append({"title": title, "paragraphs": paragraphs})
    return {"data": articles}


def _hotpotqa(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "question": row["question"],
            "answer": row["answer"],
            "context": [list(of) for of in zip(row["context"]["title"], row["context"]["sentences"], strict=True)],
        }
        for row in rows
    ]
