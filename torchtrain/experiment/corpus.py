"""The documents of an experiment: pieces of several lengths to train on, and whole ones to measure on.

Rows of 1,024 tokens out of documents of 7,000 hold one document each, and every mask is the same. Cut at line ends into
pieces, real text gives rows of several documents, as 64K tokens hold several web pages.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from anchorline.errors import UserError
from anchorline.files import replace_file
from torchtrain.data.corpus import BadRecord, Document, read
from torchtrain.data.packing import random_stream
from torchtrain.experiment.spec import CorpusConfig

_SPLIT, _LENGTHS = 0, 1  # what a random stream is for


def write_corpus(corpus: CorpusConfig, train: Path, measured: Path) -> None:
    """Write the pieces and the whole documents, a line of JSON each: `text` and `domain`.

    Equal texts stand on one side. Who finds both files there leaves them.

    Raises:
        UserError: a source cannot be read, or no document is left for one of the two.
    """
    if train.is_file() and measured.is_file():
        return
    pieces: list[Document] = []
    whole: dict[str, Document] = {}
    drawn: dict[str, bool] = {}
    split, lengths = random_stream(corpus.seed, _SPLIT), random_stream(corpus.seed, _LENGTHS)
    for source in corpus.sources:
        for found in read(source):
            if isinstance(found, BadRecord):
                raise UserError(f"corpus.sources: {found}; remove it or choose another source")
            is_new = found.text not in drawn
            if is_new:
                drawn[found.text] = bool(split.random() < corpus.measured_share)
            if drawn[found.text]:
                whole[found.text] = found
            elif is_new:
                pieces += [Document(text, found.domain) for text in cut(found.text, corpus.characters, lengths)]
    if not pieces or not whole:
        raise UserError(
            f"corpus: {len(pieces)} pieces to train on and {len(whole)} documents to measure on; change measured_share "
            "or give more documents"
        )
    train.parent.mkdir(parents=True, exist_ok=True)
    for path, documents in ((measured, whole.values()), (train, pieces)):
        lines = (json.dumps({"text": one.text, "domain": one.domain}) + "\n" for one in documents)
        replace_file(path, "".join(lines).encode())


def read_corpus(path: Path) -> list[Document]:
    """Return what `write_corpus` wrote."""
    with path.open(encoding="utf-8") as lines:
        return [Document(**json.loads(line)) for line in lines]


def cut(text: str, characters: tuple[int, int], random: np.random.Generator) -> Iterator[str]:
    """Cut a text at line ends (inside a line that is too long, at its spaces) into pieces of drawn lengths, in order.

    Together they are the text, but for blank ones.

    Args:
        text: any.
        characters: the least and the most a length may be; it is drawn evenly in its logarithm.
        random: draws the lengths.
    """
    low, high = np.log(characters)
    place = 0
    while place < len(text):
        room = int(np.exp(random.uniform(low, high)))
        end = min(place + max(1, room), len(text))
        if end < len(text):
            ends = [text.rfind(mark, place, end) + 1 for mark in ("\n", " ")]
            end = next((at for at in ends if at > place + characters[0] // 2), end)
        if text[place:end].strip():
            yield text[place:end]
        place = end
