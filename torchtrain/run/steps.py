"""The steps of a run: each is taken, checked by the guard, counted, and yielded as one value."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anchorline.errors import UserError
from torchtrain.checkpoint import rng
from torchtrain.checkpoint.state import state_of
from torchtrain.config import TrainConfig
from torchtrain.modeling.weights import first_not_finite
from torchtrain.run.setup import Setup
from torchtrain.training.flops import FlopCounter, peak_flops
from torchtrain.training.guard import Guard
from torchtrain.training.micro_batch import make_ahead
from torchtrain.training.step import StepResult, step_batches, take_step
from torchtrain.training.strategy import Strategy


class _StoppedError(Exception):
    """A step is left between two of its micro-batches."""


def check_finite(strategy: Strategy, when: str, advice: str) -> None:
    """Refuse weights, masters and moments that are not finite; name the tensor. `when`, `advice`: for the message."""
    if (name := first_not_finite(_tensors_of(strategy))) is not None:
        raise UserError(f"{name} is not finite {when}; {advice}")


def _tensors_of(strategy: Strategy) -> Iterator[tuple[str, Tensor]]:
    yield from strategy.model.named_parameters()
    for fragment in state_of(strategy).fragments():
        for kind, x_n in fragment.tensors.items():
            yield f"{kind} of {fragment.parameter}", x_n


@dataclass(frozen=True)
class Step:
    """A step that is done: what it computed, the same on every rank, and how fast."""

    number: int  # from 1
    result: StepResult
    left_out: str | None  # why nothing was updated
    tokens: int
    tokens_seen: int  # with those of the steps before
    flops: int
    seconds: float
    mfu: float | None  # None where the device's peak is not known
    memory_gib: float | None  # the peak; None where the system does not tell

    def event(self) -> dict[str, Any]:
        """Return what `metrics.jsonl` holds of it."""
        counts = {"live_pairs": self.result.live_pairs, "flops": self.flops}
        event = {"step": self.number, "tokens_seen": self.tokens_seen, **self.result.as_dict(), **counts}
        return event if self.left_out is None else event | {"left_out": self.left_out}

    def speed(self) -> dict[str, float]:
        """Return what `timing.jsonl` holds of it."""
        speed = {
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds,
            "flops_per_second": self.flops / self.seconds,
        }
        where_known = {"mfu": self.mfu, "memory_gib": self.memory_gib}
        return speed | {name: value for name, value in where_known.items() if value is not None}


def take_steps(
    train: TrainConfig,
    setup: Setup,
    strategy: Strategy,
    counter: FlopCounter,
    guard: Guard,
    first: int = 0,
    tokens_seen: int = 0,
    on_part: Callable[[str], None] = lambda part: None,
    stops: Callable[[], bool] = lambda: False,
) -> Iterator[Step]:
    """Train to the end, or until `stops`; yield each step when it is done.

    strategy: holds the state after `first` steps, in which `tokens_seen` were seen.
    counter: of the whole model.
    on_part: called with how far a step is, in words, after each of its micro-batches.
    stops: asked between two of them, on all ranks alike; True leaves the step as if it had not begun.
    Raises UserError, OtherRankFailed: a bad step; see `Guard.leave_out`.
    """
    world = strategy.world
    peak = peak_flops(world.device, setup.model.dtype)
    domains, steps = setup.store.domains, range(first, train.steps)
    ahead = make_ahead(
        lambda step: step_batches(setup.rows, step, train, domains, world, setup.loaded.engine), steps, world.device
    )
    # An error keeps the generator in its traceback; the garbage collector may close it in the very thread it joins.
    with closing(ahead):
        for step in steps:
            started = time.perf_counter()
            batches, generators = next(ahead), rng.capture()
            numbers = itertools.count(1)

            def note_part(*_: object, numbers: Iterator[int] = numbers, of: int = len(batches)) -> None:
                number = next(numbers)
                on_part(f"micro-batch {number} of {of}")
                if number < of and stops():
                    raise _StoppedError

            try:
                result = take_step(strategy, batches, domains, step, train, guard.fault_of_loss, note_part)
            except _StoppedError:
                rng.restore(generators)
                return
            fault = result.fault or guard.fault_of_norm(result.gradient_norm)
            if fault is None:
                guard.note_good(result.losses.overall.value)
            else:
                _leave_out(strategy, guard, step + 1, fault, result)
            seconds = time.perf_counter() - started
            tokens, seconds = world.sum([sum(batch.tokens for batch in batches), seconds / world.size])
            tokens = int(tokens) // world.sequence_parallel
            tokens_seen += tokens
            flops = counter.flops(tokens, result.losses.overall.tokens, result.live_pairs)
            yield Step(
                number=step + 1,
                result=result,
                left_out=fault,
                tokens=tokens,
                tokens_seen=tokens_seen,
                flops=flops,
                seconds=seconds,
                mfu=flops / seconds / (peak * world.size) if peak else None,
                memory_gib=_memory_gib(world.device),
            )


def _leave_out(strategy: Strategy, guard: Guard, number: int, fault: str, result: StepResult) -> None:
    with strategy.world.together():
        # Weights that are not numbers make every step a bad one: leaving steps out would be of no use.
        check_finite(strategy, f"before step {number}", f"so {fault}; lower train.learning_rate and train anew")
    with strategy.world.together():
        guard.leave_out(number, fault, result.as_dict())


def _memory_gib(device: torch.device) -> float | None:
    """Return the peak memory in GiB: of a GPU since the last call, without one of this process since its start."""
    if device.type != "cuda":
        try:
            import resource
        except ImportError:  # Windows
            return None
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return held / (2**30 if sys.platform == "darwin" else 2**20)  # bytes there, KiB elsewhere
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    torch.cuda.reset_peak_memory_stats(device)
    return peak
