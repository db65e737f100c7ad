"""Seconds of one call, on a device that others may share.

On a CPU with one thread the time is the process's own, which other processes lengthen little; with more threads, and on
a GPU, it is the clock's, with the device waited for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anchorline.errors import UserError


@dataclass(frozen=True)
class Clock:
    """Times calls on a device."""

    device: torch.device
    threads: int | None

    @property
    def kind(self) -> str:
        """What its seconds are."""
        if self.device.type != "cpu":
            return "the clock's, the GPU waited for"
        return "the CPU's, of one thread" if self.threads == 1 else "the clock's"

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        """Return how long a call took, and what it gave."""
        now = time.process_time if self.device.type == "cpu" and self.threads == 1 else time.perf_counter
        self._wait()
        start = now()
        result = call()
        self._wait()
        return now() - start, result

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def open_clock(device: str, threads: int | None) -> Clock:
    """Choose the device and set its threads.

    Raises:
        UserError: no CUDA device is here.
    """
    here = torch.cuda.is_available()
    if device == "cuda" and not here:
        raise UserError("device cuda: torch sees no CUDA device; use cpu or auto")
    chosen = torch.device("cuda" if device == "cuda" or (device == "auto" and here) else "cpu")
    if chosen.type == "cpu" and threads is not None:
        torch.set_num_threads(threads)
    return Clock(chosen, threads)
