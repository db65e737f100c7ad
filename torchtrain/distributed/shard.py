"""How rows are assigned to ranks, and how a row is split among the ranks that share it: by tokens, which attention
exchanges for heads (`torchtrain.distributed.ulysses`), or by whole documents, where each rank computes the anchor.

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

# Padding of a row: in no document, without a label.
_FILL = {"input_ids": 0, "position_ids": 0, "document_ids": PADDING, "shift_labels": IGNORED, "domain_ids": -1}
_FILL |= {"weights": 0, "contexts": 0}

ROOM = 1 / 16  # by which a rank's tokens and work may exceed an even share where ranks take whole documents
_MATRICES = 32_768  # a token's matrix products take about as long as causal attention to this many tokens


def assign_rows(first: int, count: int, micro_batch: int, world: World) -> list[range]:
    """Return this rank's rows of a step, a range of `micro_batch` rows for each forward.

    Groups take micro-batches in turn: the step's `count` rows from `first` on are the same for any number of ranks.
    """
    starts = range(first, first + count, micro_batch)[world.data_rank :: world.data_parallel]
    return [range(start, start + micro_batch) for start in starts]


def assign_held_out(
    rows: Sequence[Mapping[str, np.ndarray]], micro_batch: int, world: World
) -> list[tuple[int, list[Mapping[str, np.ndarray]]]]:
    """Return (first row's number, rows) of this rank's micro-batches of held-out rows, as many as every other rank's:
    where rows are missing for that, the first is repeated without labels, and not counted.
    """
    missing = -len(rows) % (micro_batch * world.data_parallel)
    blank = {**rows[0], "shift_labels": np.full_like(rows[0]["shift_labels"], IGNORED)}
    all_rows = [*rows, *[blank] * missing]
    return [
        (numbers.start, [all_rows[i] for i in numbers]) for numbers in assign_rows(0, len(all_rows), micro_batch, world)
    ]


def pad(batch: dict[str, Tensor], multiple: int) -> dict[str, Tensor]:
    """Pad rows [B, T] to a multiple of a length."""
    missing = -batch["input_ids"].shape[1] % multiple
    if not missing:
        return batch
    return {name: F.pad(x, (0, missing), value=_FILL[name]) for name, x in batch.items()}


def split_tokens(batch: dict[str, Tensor], world: World) -> dict[str, Any]:
    """Return this rank's part [B, t] of padded rows [B, T], contiguous; `document_ids` stays whole."""
    if world.sequence_parallel == 1:
        return batch
    number = world.sequence_rank
    parts = {name: x.chunk(world.sequence_parallel, dim=1)[number].contiguous() for name, x in batch.items()}
    return parts | {"document_ids": batch["document_ids"]}


def split_documents(batch: dict[str, Tensor], world: World) -> dict[str, Any] | None:
    """Return this rank's whole documents [B, t] of rows [B, T], after each row's anchor; t differs among ranks.

    Only the row's first rank keeps the anchor's labels. None: the documents of a row do not divide evenly.
    """
    owners = [_assign_documents(ids_T, world.sequence_parallel) for ids_T in batch["document_ids"]]
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


def _assign_documents(ids_T: Tensor, ranks: int) -> Tensor | None:
    """Return each document's rank [D + 1], the longest first to the least work; None: a rank would get too much."""
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
