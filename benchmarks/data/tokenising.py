"""Tokens a second of one thread, from a JSONL file: the same tokens, an EOS behind each document, by everybody."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import inputs
from benchmarks.data.measure import Work

KINDS = ("cut", "whole")


def prepare(folder: Path, kind: str) -> Work:
    """Our worker: what `torchtrain prepare` runs for a task, in this process."""
    from torchtrain.config import DataConfig, Source
    from torchtrain.data.corpus import Task, list_parts
    from torchtrain.data.store import TokenStore
    from torchtrain.data.tasks import SHARDS, MakeShard

    tokenizer, _ = inputs.tokenizer(folder)
    source = Source(files=str(inputs.corpus(folder, kind)))
    tasks = [Task(0, tuple(list_parts(source)))]
    out = _empty(folder / "ours")
    make = MakeShard(out, DataConfig(sources=[source]), tasks, tokenizer, one_thread=True)
    assert make.tokeniser  # made once a process, as the others' tokenizers

    def check(_: Any) -> dict[str, Any]:
        store = TokenStore.open(out / SHARDS / "00000")
        return {"digest": store.header.sha256, "tokens": store.token_count}

    return Work(make, check)


def tokenizers(folder: Path, kind: str) -> Work:
    """`tokenizers` alone: `encode_batch` of texts that are in memory; nothing is read or written."""
    return _by_tokenizers(folder, kind, "encode_batch")


def tokenizers_fast(folder: Path, kind: str) -> Work:
    """The same by `encode_batch_fast`, which leaves out where tokens stand in their text."""
    return _by_tokenizers(folder, kind, "encode_batch_fast")


def _by_tokenizers(folder: Path, kind: str, method: str) -> Work:
    tokenizer, _ = inputs.tokenizer(folder)
    lines = inputs.corpus(folder, kind).read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    encode = getattr(tokenizer.backend_tokenizer, method)

    def check(found: Any) -> dict[str, Any]:
        return _digest(np.array([*one.ids, tokenizer.eos_token_id], dtype=np.int32) for one in found)

    return Work(lambda: encode(texts, add_special_tokens=False), check)


def datatrove(folder: Path, kind: str) -> Work:
    """datatrove's JsonlReader and DocumentTokenizer, documents in their order."""
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    tokenizer, file = inputs.tokenizer(folder)
    path = inputs.corpus(folder, kind)
    out = _empty(folder / "datatrove")
    reader = JsonlReader(str(path.parent), glob_pattern=path.name)
    writer = DocumentTokenizer(
        str(out), str(file), eos_token=str(tokenizer.eos_token), shuffle_documents=False, save_final_metadata=False
    )
    assert writer.token_size == 2

    def check(_: Any) -> dict[str, Any]:
        (found,) = out.glob("*.ds")
        return _digest([np.fromfile(found, dtype=np.uint16).astype(np.int32)])

    return Work(lambda: writer.run(reader.run(None)), check)


def datasets(folder: Path, kind: str) -> Work:
    """`datasets`: `load_dataset` and a plain batched `map`."""
    import datasets as library

    tokenizer, _ = inputs.tokenizer(folder)
    path = str(inputs.corpus(folder, kind))
    cache = str(_empty(folder / "datasets"))
    library.disable_progress_bars()

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False)
        return {"input_ids": [[*one, tokenizer.eos_token_id] for one in ids["input_ids"]]}

    def work() -> Any:
        found = library.load_dataset("json", data_files=path, split="train", cache_dir=cache)
        return found.map(encode, batched=True, remove_columns=["text"])

    def check(found: Any) -> dict[str, Any]:
        return _digest(np.array(ids, dtype=np.int32) for ids in found["input_ids"])

    return Work(work, check)


ENGINES: dict[str, Callable[[Path, str], Work]] = {
    "torchtrain prepare": prepare,
    "tokenizers, encode_batch": tokenizers,
    "tokenizers, encode_batch_fast": tokenizers_fast,
    "datatrove, DocumentTokenizer": datatrove,
    "datasets, map": datasets,
}


def _digest(documents: Any) -> dict[str, Any]:
    digest, tokens = hashlib.sha256(), 0
    for ids in documents:
        digest.update(ids.tobytes())
        tokens += len(ids)
    return {"digest": digest.hexdigest(), "tokens": tokens}


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder
