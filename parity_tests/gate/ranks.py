"""Several ranks in one process: threads that meet in every sum.

The trainer's own code computes on each rank. Only `torch.distributed.all_reduce` is replaced, by a sum in the order of
ranks. `parity_tests/tests/test_distributed.py` runs real processes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from torchtrain.distributed.world import World

_Result = TypeVar("_Result")
_PATIENCE = 600  # seconds: a rank that has not come by then does not come


def run_ranks(count: int, device: torch.device, run: Callable[[World], _Result]) -> list[_Result]:
    """Run a function on every rank; return what each returned. Raises what a rank raised that waited for no other."""
    if count == 1:
        return [run(World(device=device))]
    meeting, this_thread = threading.Barrier(count), threading.local()
    given: list[Tensor] = [torch.empty(0)] * count

    class Later:
        """A sum that is made when it is waited for, on the rank's own thread."""

        def __init__(self, tensor: Tensor) -> None:
            self._tensor = tensor

        def wait(self) -> None:
            all_reduce(self._tensor)

    def all_reduce(tensor: Tensor, group: None = None, async_op: bool = False) -> Later | None:
        if async_op:
            return Later(tensor)
        given[this_thread.rank] = tensor
        meeting.wait(_PATIENCE)
        total = given[0].clone()
        for other in given[1:]:
            total += other
        meeting.wait(_PATIENCE)  # all have read before anyone writes
        tensor.copy_(total)
        return None

    def on_rank(rank: int) -> _Result:
        this_thread.rank = rank
        try:
            return run(World(rank, count, device=device))
        except BaseException:
            meeting.abort()
            raise

    with patch.object(dist, "all_reduce", all_reduce), ThreadPoolExecutor(count) as pool:
        ranks = [pool.submit(on_rank, rank) for rank in range(count)]
        errors = [error for error in (rank.exception() for rank in ranks) if error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [rank.result() for rank in ranks]
