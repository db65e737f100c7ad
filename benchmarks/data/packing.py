"""Seconds to plan rows of 64K tokens: ours from lengths alone, TRL's `pack_dataset` on a table of as many tokens.

TRL moves tokens as it packs, ours copies none until a row is read. So that its table fits into memory, a token is one
byte there, which is in its favour.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.data import inputs
from benchmarks.data.measure import Work

LENGTH = 65_536
KINDS = ("120000",)  # documents


def sequential(folder: Path, kind: str) -> Work:
    """Documents end to end, cut where a row is full."""
    return _plan(kind, "sequential")


def best_fit(folder: Path, kind: str) -> Work:
    """Only what is longer than a row is cut."""
    return _plan(kind, "best_fit")


def _plan(kind: str, strategy: Literal["sequential", "best_fit"]) -> Work:
    from torchtrain.data.packing import PackPlan

    lengths = inputs.lengths_of(int(kind))
    none = np.zeros_like(lengths)

    def check(plan: Any) -> dict[str, Any]:
        return {"rows": len(plan), "tokens": plan.tokens, "dropped": plan.dropped_tokens, "cuts": plan.cuts}

    return Work(lambda: PackPlan(lengths, LENGTH, none, seed=0, strategy=strategy), check)


def wrapped(folder: Path, kind: str) -> Work:
    """TRL's `wrapped`, all documents in one batch."""
    return _pack(kind, "wrapped", whole=True)


def bfd(folder: Path, kind: str) -> Work:
    """TRL's `bfd`, all documents in one batch: what is longer than a row is cut off and lost."""
    return _pack(kind, "bfd", whole=True)


def bfd_split(folder: Path, kind: str) -> Work:
    """TRL's `bfd_split`, all documents in one batch: the work of our best fit."""
    return _pack(kind, "bfd_split", whole=True)


def bfd_split_batches(folder: Path, kind: str) -> Work:
    """TRL's `bfd_split` as it is called, in batches of 1,000 documents."""
    return _pack(kind, "bfd_split", whole=False)


def _pack(kind: str, strategy: str, whole: bool) -> Work:
    import datasets
    import pyarrow as pa
    from trl import pack_dataset

    datasets.disable_progress_bars()
    lengths = inputs.lengths_of(int(kind))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = pa.array(np.zeros(offsets[-1], dtype=np.int8))
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), values)})
    found = datasets.Dataset(datasets.table.InMemoryTable(table))
    settings: dict[str, Any] = {"keep_in_memory": True, "load_from_cache_file": False}
    if whole:
        settings |= {"batch_size": len(lengths), "writer_batch_size": len(lengths)}

    def check(packed: Any) -> dict[str, Any]:
        held = sum(len(chunk.flatten()) for chunk in packed.data.column("input_ids").chunks)
        return {"rows": len(packed), "tokens": held, "dropped": int(offsets[-1]) - held}

    return Work(lambda: pack_dataset(found, LENGTH, strategy, map_kwargs=settings), check)


ENGINES: dict[str, Callable[[Path, str], Work]] = {
    "torchtrain, sequential": sequential,
    "TRL, wrapped, one batch": wrapped,
    "torchtrain, best_fit": best_fit,
    "TRL, bfd_split, one batch": bfd_split,
    "TRL, bfd_split, as called": bfd_split_batches,
    "TRL, bfd, one batch": bfd,
}
