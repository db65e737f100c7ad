"""How `torchtrain bench` measures: the device, the time of a call, and its error by the error rule."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from anchorline.errors import UserError
from anchorline.tolerance import judge

Spread = dict[str, float]  # median, least and most over the turns


@dataclass(frozen=True)
class Clock:
    """Times calls on a device. With one thread on a CPU it measures CPU time, which other processes disturb little."""

    device: torch.device
    threads: int | None

    @property
    def counts_cpu_time(self) -> bool:
        """Whether seconds are CPU time, and not wall time."""
        return self.device.type == "cpu" and self.threads == 1

    def seconds(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call with its work on the device, after two calls as warm-up."""
        timer: dict[str, Any] = {"timer": time.process_time} if self.counts_cpu_time else {}
        measured = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads(), **timer)
        return measured.timeit(1).median


def open_clock(device: str, threads: int | None) -> Clock:
    """Choose the device and set its threads.

    Raises:
        UserError: `device` is cuda, and there is none.
    """
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UserError("device cuda: torch sees no CUDA device; use cpu or auto")
    chosen = torch.device("cuda" if device != "cpu" and available else "cpu")
    if chosen.type == "cpu" and threads is not None:
        torch.set_num_threads(threads)
    return Clock(chosen, threads)


def spread_of(values: Sequence[float]) -> Spread:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def format_spread(spread: Spread) -> str:
    """Return `median (least to most)`."""
    middle, low, high = (f"{spread[name]:.3g}" for name in ("median", "least", "most"))
    return f"{middle} ({low} to {high})"


def error_ratio(candidate: Tensor, truth: Tensor, reference: Tensor, dtype: torch.dtype) -> float:
    """Return the candidate's error over what the error rule allows: up to 1 passes; infinite if not finite.

    Args:
        candidate: the result under test, any shape, on any device.
        truth: the same quantity, computed in a wider dtype.
        reference: the same quantity with the candidate's permitted roundings.
        dtype: the dtype that the candidate computes in.
    """
    verdict = judge(*(_array(x) for x in (candidate, truth, reference)), dtype=str(dtype).removeprefix("torch."))
    return verdict.ratio if verdict.allowance < float("inf") else float("inf")


def _array(x: Tensor) -> np.ndarray:
    x = x.detach().cpu()
    return (x.float() if x.dtype in (torch.bfloat16, torch.float16) else x).numpy()  # numpy has no bfloat16
