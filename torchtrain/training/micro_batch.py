"""What a rank is given of one micro-batch: made on the host, ahead of its step, then sent to the device.

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
    """This rank's part of a micro-batch [B, t] and the plan that its attention follows. Made by `make_micro_batch`."""

    part: Mapping[str, Any]  # the five arrays, and `labels`; `document_ids` are the plan's
    plan: AttentionPlan  # of whole rows [B, T]; or, where ranks have whole documents, of the part
    tokens: int  # of whole rows, padding apart
    rows: AttentionPlan  # of whole rows [B, T]; stays on the host

    @property
    def labels(self) -> Labels:
        """Which tokens of the part have a label."""
        return self.part["labels"]

    def pin_memory(self) -> "MicroBatch":
        """Return it in page-locked memory, from which a GPU copies while the host goes on."""
        part = {name: x.pin_memory() for name, x in self.part.items()}
        return replace(self, part=part, plan=self.plan.pin_memory())

    def to(self, device: torch.device) -> "MicroBatch":
        """Return it on `device`. From page-locked memory, the host does not wait for the copies."""
        part = {name: x.to(device, non_blocking=True) for name, x in self.part.items()}
        return replace(self, part=part, plan=self.plan.to(device))


def make_micro_batch(
    batch: dict[str, Tensor], world: World, labels_of: Callable[[Mapping[str, Tensor]], Labels]
) -> MicroBatch:
    """Cut this rank's part out of whole rows, plan their attention and find their labels.

    Args:
        batch: the five arrays [B, T] on the host, as `torchtrain.data.collate` stacks them.
        world: this rank's place; for a GPU the result lies in page-locked memory.
        labels_of: finds the labels of a part, with the groups that losses are summed in (`Losses.labels_of`).

    Raises:
        UserError: `document_ids` that break the rule; see `make_plan`.
    """
    batch = pad(batch, world.sequence_parallel)
    rows = plan = make_plan(batch["document_ids"])
    tokens = int((batch["document_ids"] != PADDING).sum())
    part = split_documents(batch, world) if world.whole_documents else None
    if part is None:
        part = split_tokens(batch, world)
    else:
        plan = make_plan(part["document_ids"])
    made = MicroBatch(part | {"labels": labels_of(part)}, plan, tokens, rows)
    return made.pin_memory() if world.device.type == "cuda" else made


def make_ahead(make: Callable[[int], _Made], numbers: Iterable[int], device: torch.device) -> Generator[_Made]:
    """Yield `make(number)` of each number; while one is used, a thread makes the next.

    What `make` raises is raised where its result would have come.
    """

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread: pinning would open the first GPU otherwise

    with ThreadPoolExecutor(1, "batches", begin) as thread:
        coming: Future[_Made] | None = None
        for number in numbers:
            following = thread.submit(make, number)
            if coming is not None:
                yield coming.result()
            coming = following
        if coming is not None:
            yield coming.result()
