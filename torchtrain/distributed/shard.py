"""How a step's rows are dealt out to ranks, and a row cut into the parts of the ranks that share it.

A row is cut in one of two ways. `part_of` cuts its tokens into even parts, whatever they are; attention then exchanges
them for heads (`torchtrain.distributed.ulysses`). `documents_of` gives each rank whole documents. They need nothing
of other ranks, because a document sees itself and the anchor alone, and each rank computes the anchor's few tokens
itself. Both ways compute the same.

Legend: B batch · T tokens of a row · t tokens of this rank's part · D documents of a row.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchtrain.distributed.world import World
from torchtrain.marks import ANCHOR, IGNORED, PADDING

# What fills the end of rows whose length the ranks do not divide: no document, no label, nothing sees it.
_FILL = {"input_ids": 0, "position_ids": 0, "document_ids": PADDING, "shift_labels": IGNORED, "domain_ids": -1}

ROOM = 1 / 16  # that the fullest rank's tokens and work may be over an even share where ranks have whole documents
_MATRICES = 32_768  # a token's matrix products take about as long as attention to this many tokens, halved by the mask


def rows_of_rank(first: int, count: int, micro_batch: int, world: World) -> list[range]:
    """Return the numbers of this rank's rows of a step, a range each micro-batch.

    Micro-batches follow each other in the order of rows and are dealt out in turn, so that the rows of a step are the
    same for every number of ranks.

    Args:
        first: number of the step's first row.
        count: its rows, a multiple of micro_batch x data-parallel groups.
        micro_batch: rows of one forward.
        world: whose ranks of one data-parallel group get the same rows.
    """
    starts = range(first, first + count, micro_batch)[world.data_rank :: world.data_parallel]
    return [range(start, start + micro_batch) for start in starts]


def deal_out(
    rows: Sequence[Mapping[str, np.ndarray]], micro_batch: int, world: World
) -> list[list[Mapping[str, np.ndarray]]]:
    """Deal held-out rows out in micro-batches, as many to each rank: ranks must run their forwards together.

    What is missing for that is made up of rows that are there, without their labels: they are run and not counted.
    """
    missing = -len(rows) % (micro_batch * world.data_parallel)
    blank = {**rows[0], "shift_labels": np.full_like(rows[0]["shift_labels"], IGNORED)}
    all_rows = [*rows, *[blank] * missing]
    return [[all_rows[i] for i in numbers] for numbers in rows_of_rank(0, len(all_rows), micro_batch, world)]


def pad(batch: dict[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """Fill up rows [B, T] to a length that is a multiple, with tokens that are in no document and have no label."""
    missing = -batch["input_ids"].shape[1] % multiple
    if not missing:
        return batch
    return {name: F.pad(x, (0, missing), value=_FILL[name]) for name, x in batch.items()}


def part_of(batch: dict[str, Tensor], world: World) -> dict[str, Any]:
    """Return this rank's part [B, t] of padded rows [B, T]. `document_ids` stays whole: attention sees whole rows.

    A part is contiguous: only such a tensor is copied to a GPU without a wait.
    """
    if world.sequence_parallel == 1:
        return batch
    number = world.sequence_rank
    parts = {name: x.chunk(world.sequence_parallel, dim=1)[number].contiguous() for name, x in batch.items()}
    return parts | {"document_ids": batch["document_ids"]}


def documents_of(batch: dict[str, Tensor], world: World) -> dict[str, Any] | None:
    """Return this rank's whole documents [B, t] of rows [B, T], each row's anchor in front; t differs among ranks.

    The anchor's labels stay with the first rank of the row. None: the documents of a row cannot be dealt out evenly.
    """
    owners = [_deal_documents(ids_T, world.sequence_parallel) for ids_T in batch["document_ids"]]
    kept = list[Tensor]()
    for ids_T, owner_D in zip(batch["document_ids"], owners, strict=True):
        if owner_D is None:
            return None
        own_T = (ids_T > 0) & (owner_D[ids_T.clamp(min=0)] == world.sequence_rank)
        kept.append(((ids_T == ANCHOR) | own_T).nonzero().flatten())
    t = max(1, *map(len, kept))
    part = {}
    for name, x in batch.items():
        rows = [F.pad(x_T[index], (0, t - len(index)), value=_FILL[name]) for x_T, index in zip(x, kept, strict=True)]
        part[name] = torch.stack(rows)
    if world.sequence_rank:
        part["shift_labels"].masked_fill_(part["document_ids"] == ANCHOR, IGNORED)
    return part


def _deal_documents(ids_T: Tensor, ranks: int) -> Tensor | None:
    """Return the rank [D + 1] of each document by its number: the longest first, to the rank with least work so far.

    None where that leaves one of the ranks with too much.
    """
    lengths_D = torch.bincount(ids_T[ids_T > 0], minlength=1)
    owner_D = torch.zeros_like(lengths_D)
    work, tokens = [0] * ranks, [int((ids_T == ANCHOR).sum())] * ranks
    for document in lengths_D.argsort(descending=True, stable=True).tolist():
        length, rank = int(lengths_D[document]), min(range(ranks), key=work.__getitem__)
        owner_D[document] = rank
        work[rank] += length * (_MATRICES + length)
        tokens[rank] += length
    most = (1 + ROOM) / ranks
    return owner_D if max(tokens) <= most * len(ids_T) and max(work) <= most * sum(work) else None
