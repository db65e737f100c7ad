"""How a step's rows are dealt out to ranks, and a row cut into the parts of the ranks that share it.

Legend: B batch · T tokens of a row · t tokens of this rank's part.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from torchtrain.distributed.world import World
from torchtrain.marks import IGNORED, PADDING

# What fills the end of rows whose length the ranks do not divide: no document, no label, nothing sees it.
_FILL = {"input_ids": 0, "position_ids": 0, "document_ids": PADDING, "shift_labels": IGNORED, "domain_ids": -1}


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
