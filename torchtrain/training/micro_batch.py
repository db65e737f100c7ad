"""A rank's part of one micro-batch, prepared on the host ahead of its step and then copied to the device.

Legend: B batch · T tokens of a row · t tokens of this rank's part.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchtrain.attention import AttentionPlan, make_plan
from torchtrain.distributed.shard import pad, split_documents, split_tokens
from torchtrain.distributed.world import World
from torchtrain.marks import PADDING
from torchtrain.training.labels import Labels

_Made = TypeVar("_Made")


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """This rank's part [B, t] of a micro-batch and its attention plan. `make_micro_batch` makes it."""

    part: Mapping[str, Any]  # the five arrays, and `labels`; `document_ids` are the plan's
    plan: AttentionPlan  # of whole rows [B, T], or of the part if ranks take whole documents
    tokens: int  # of whole rows, without padding
    rows: AttentionPlan  # of whole rows [B, T]; stays on the host

    @property
    def labels(self) -> Labels:
        """The labels of the part."""
        return self.part["labels"]

    def pin_memory(self) -> "MicroBatch":
        """Return the micro-batch in page-locked memory, from which copies to a GPU do not block the host."""
        part = {name: x.pin_memory() for name, x in self.part.items()}
        return replace(self, part=part, plan=self.plan.pin_memory())

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on `device`. Copies from page-locked memory do not block the host."""
        part = {name: x.to(device, non_blocking=True) for name, x in self.part.items()}
        return replace(self, part=part, plan=self.plan.to(device))


def make_micro_batch(
    batch: dict[str, Tensor], world: World, labels_of: Callable[[Mapping[str, Tensor]], Labels], engine: str = ""
) -> MicroBatch:
    """Take this rank's part of whole rows, plan its attention and find its labels.

    batch: the five arrays [B, T] on the host, as from `torchtrain.data.stack_rows`.
    world: of this rank; for a GPU the result is in page-locked memory.
    labels_of: finds the labels of a part and their groups (`Losses.labels_of`).
    engine: of attention, if what its plan needs shall be made now.
    Raises UserError: `document_ids` break the mask rule; see `make_plan`.
    """
    batch = pad(batch, world.sequence_parallel)
    rows = plan = make_plan(batch["document_ids"])
    tokens = int((batch["document_ids"] != PADDING).sum())
    part = split_documents(batch, world) if world.whole_documents else None
    if part is None:
        part = split_tokens(batch, world)
    else:
        plan = make_plan(part["document_ids"])
    if engine == "sdpa" and plan.seqlens_q:
        plan.batches  # noqa: B018  # makes them
    made = MicroBatch(part | {"labels": labels_of(part)}, plan, tokens, rows)
    return made.pin_memory() if world.device.type == "cuda" else made


def make_ahead(make: Callable[[int], _Made], numbers: Iterable[int], device: torch.device) -> Generator[_Made]:
    """Yield `make(number)` for each number, made in a thread one ahead. An error of `make` is raised in its turn."""

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for this thread; otherwise pinning memory would use the first GPU

    with ThreadPoolExecutor(1, "batches", begin) as thread:
        coming: Future[_Made] | None = None
        for number in numbers:
            following = thread.submit(make, number)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
