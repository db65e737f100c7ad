"""Small tokenizers, corpora and stores for the tests of the data package; nothing here needs a network."""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from torchtrain.data.store import Documents

WORDS = 50


def word_tokenizer(words: int = WORDS, bos: str | None = "<s>", eos: str | None = "</s>") -> PreTrainedTokenizerFast:
    """Return a tokenizer of the words w0..: <unk> 0, <s> 1, </s> 2, then w0 = 3 and so on; one token a word."""
    names = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(words))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, unk_token="<unk>")


def write_jsonl(path: Path, records: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def memory_store(lengths: Sequence[int], domains: Sequence[int] | None = None, first: int = 1000) -> Documents:
    """Return documents in memory in which every token is another number, counting up from `first`."""
    ends = np.cumsum([0, *lengths])
    of_document = list(domains) if domains is not None else [0] * len(lengths)
    tokens = [np.arange(first + start, first + stop) for start, stop in pairwise(ends)]
    return Documents.of(tokens, of_document, [f"domain{i}" for i in range(max(of_document, default=0) + 1)])
