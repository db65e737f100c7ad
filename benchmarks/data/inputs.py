"""What the measurements read, made once: documents of real text, lengths as a corpus has them, stores of rows."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from anchorline import corpora
from anchorline.files import save
from torchtrain.modeling.smollm2 import smollm2_folder
from torchtrain.modeling.source import open_tokenizer

CHARACTERS = 5_000_000  # of each corpus to tokenise
MEAN, SPREAD, LONGEST = 1013, 1.5, 500_000  # tokens of a document: mean and spread (of the logarithm), and the bound
_CHARACTERS_A_TOKEN = 4


def lengths_of(documents: int, seed: int = 0) -> np.ndarray:
    """Return the tokens of each document, int64: lognormal, which is how web corpora look on a log axis."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SPREAD**2 / 2, SPREAD, documents)
    return np.clip(drawn, 1, LONGEST).astype(np.int64)


def corpus(folder: Path, kind: str) -> Path:
    """Return a JSONL file of the demo's text: its documents `whole`, or `cut` to lengths as a web corpus has them."""
    path = folder / f"{kind}.jsonl"
    if not path.exists():
        texts = list(_shuffle())
        if kind == "cut":
            texts = list(_cut("".join(texts)))
        lines, held = [], 0
        for text in texts:
            if held >= CHARACTERS:
                break
            lines.append(json.dumps({"text": text}))
            held += len(text)
        folder.mkdir(parents=True, exist_ok=True)
        save(path, ("\n".join(lines) + "\n").encode())
    return path


def tokenizer(folder: Path) -> tuple[PreTrainedTokenizerFast, Path]:
    """Return SmolLM2's tokenizer, and the file of its `tokenizers` backend."""
    found = open_tokenizer(str(smollm2_folder(folder / "cache", lambda line: None)))
    path = folder / "tokenizer.json"
    if not path.exists():
        Tokenizer.from_str(found.backend_tokenizer.to_str()).save(str(path))
    return found, path


def _shuffle() -> Iterator[str]:
    names: tuple[corpora.Name, ...] = ("speeches", "encyclopedia", "code")
    texts = [text for name in names for _, text in corpora.documents(name, "the benchmark")]
    for number in np.random.default_rng(0).permutation(len(texts)):
        yield texts[number]


def _cut(text: str) -> Iterator[str]:
    ends = np.cumsum(lengths_of(100_000) * _CHARACTERS_A_TOKEN)
    for start, stop in pairwise([0, *ends[ends < len(text)].tolist()]):
        if text[start:stop].strip():  # a blank one is a bad record
            yield text[start:stop]
