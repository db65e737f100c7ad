"""Rows a second from a store in the page cache, in order and shuffled: every reader gives the same tokens in each row.

A row of a step is five arrays. datatrove's reader gives tokens, and positions, from which the others are made here with
as little as possible; mosaicml-streaming gives what was written, either the tokens alone or all five arrays made ready.
"""

import hashlib
import importlib.machinery
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import inputs
from benchmarks.data.measure import Work

TOKENS = 16_777_216
KINDS = tuple(f"{length} tokens, {order}" for length in (8_192, 65_536) for order in ("in order", "shuffled"))
_VOCABULARY = 49_152
_NAMES = ("input_ids", "position_ids", "document_ids", "shift_labels", "domain_ids")


def ours(folder: Path, kind: str) -> Work:
    """`PackedRows`: five arrays of a row, planned and built when it is asked for."""
    rows = _rows(folder, _length(kind))
    return _read(lambda i: rows[i], len(rows) - 1, kind)


def datatrove(folder: Path, kind: str) -> Work:
    """`DatatroveFolderDataset`: tokens alone."""
    found = _datatrove(folder, _length(kind), positions=False)
    return _read(found.__getitem__, len(found), kind, skip=0)


def datatrove_five(folder: Path, kind: str) -> Work:
    """`DatatroveFolderDataset` with positions, and a row's other arrays made of them."""
    found = _datatrove(folder, _length(kind), positions=True)

    def read(i: int) -> dict[str, Any]:
        item = found[i]
        tokens, positions = item["input_ids"].numpy(), item["positions"].numpy()
        begins = positions == 0
        labels = np.full_like(tokens, -100)
        labels[:-1] = np.where(begins[1:], -100, tokens[1:])
        arrays = (tokens, np.arange(len(tokens)), np.cumsum(begins), labels, np.zeros_like(tokens))
        return dict(zip(_NAMES, arrays, strict=True))

    return _read(read, len(found), kind, skip=0)


def streaming(folder: Path, kind: str) -> Work:
    """`StreamingDataset`: rows of tokens, written as uint16."""
    return _streaming(folder, kind, {"input_ids": f"ndarray:uint16:{_length(kind) + 1}"})


def streaming_five(folder: Path, kind: str) -> Work:
    """`StreamingDataset`: rows of the five arrays, written as int64, as a step takes them."""
    return _streaming(folder, kind, dict.fromkeys(_NAMES, f"ndarray:int64:{_length(kind) + 1}"))


def _streaming(folder: Path, kind: str, columns: dict[str, str]) -> Work:
    _stand_in_for_torchvision()
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    rows = _rows(folder, _length(kind))
    place = folder / f"streaming-{_length(kind)}-{len(columns)}"
    if not (place / "index.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        with MDSWriter(out=str(place), columns=columns) as writer:
            for i in range(len(rows) - 1):
                row = rows[i]
                narrow = np.uint16 if len(columns) == 1 else np.int64
                writer.write({name: row[name].astype(narrow) for name in columns})
    clean_stale_shared_memory()
    found = StreamingDataset(local=str(place), shuffle=False, batch_size=1)

    def read(i: int) -> dict[str, Any]:
        # A step takes int64; of arrays that were written so nothing is copied.
        return {name: array.astype(np.int64, copy=False) for name, array in found[i].items()}

    return _read(read, len(found), kind)


def _stand_in_for_torchvision() -> None:
    """streaming imports torchvision for its sets of images; for those of tokens an empty module will do."""

    def make(name: str, **content: Any) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(content)
        sys.modules[name] = module
        return module

    functional = make("torchvision.transforms.functional", to_tensor=None)
    transforms = make("torchvision.transforms", functional=functional)
    make("torchvision", transforms=transforms, datasets=make("torchvision.datasets", VisionDataset=object))


ENGINES: dict[str, Callable[[Path, str], Work]] = {
    "torchtrain, five arrays": ours,
    "datatrove, five arrays": datatrove_five,
    "streaming, five arrays as written": streaming_five,
    "datatrove, tokens alone": datatrove,
    "streaming, tokens alone": streaming,
}


def _length(kind: str) -> int:
    return int(kind.split()[0])


def _rows(folder: Path, length: int) -> Any:
    """Return our rows of an anchor and `length` tokens. Their store is made once."""
    from torchtrain.config import PackConfig
    from torchtrain.data import PackedRows
    from torchtrain.data.store import TokenStore
    from torchtrain.data.writer import StoreWriter

    place = folder / "store"
    if not (place / "store.json").exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        random = np.random.default_rng(0)
        lengths = inputs.lengths_of(TOKENS // inputs.MEAN)
        with StoreWriter(place, 2) as writer:
            for count in lengths:
                writer.add("web", random.integers(2, _VOCABULARY, count))
            writer.finish("", [])
    store = TokenStore.open(place)
    pack = PackConfig(sequence_length=length + 1, variant="anchor")
    return PackedRows(store, np.arange(len(store)), pack, 0, [1], {}, 0)


def _datatrove(folder: Path, length: int, positions: bool) -> Any:
    """Return datatrove's reader of the same documents, written in the order in which our rows hold them."""
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from datatrove.utils.dataset import DatatroveFolderDataset

    rows = _rows(folder, length)
    place = folder / f"datatrove-{length}"
    if not (place / "done").exists():
        shutil.rmtree(place, ignore_errors=True)
        file = TokenizedFile(str(place), "rows.ds")
        plan = rows.plan(0)
        spans = [span for row in range(len(plan)) for span in plan.spans(row)]
        for number in dict.fromkeys(span.document_index for span in spans):
            file.write_bytes(rows.store.document(number).astype(np.uint16).tobytes())
        file.close()
        (place / "done").touch()
    return DatatroveFolderDataset(str(place), length - 1, filename_pattern="*.ds", return_positions=positions)


def _read(read: Callable[[int], Any], count: int, kind: str, skip: int = 1) -> Work:
    """Read all rows once before the time; the last one, which may not be full, is left out by all."""
    order: Sequence[int] = range(count)
    if kind.endswith("shuffled"):
        order = np.random.default_rng(1).permutation(count).tolist()
    digest = hashlib.sha256()
    for i in range(count):
        digest.update(np.asarray(read(i)["input_ids"], dtype=np.int64)[skip:].tobytes())

    def work() -> None:
        for i in order:
            read(i)

    return Work(work, lambda _: {"rows": count, "digest": digest.hexdigest()})
