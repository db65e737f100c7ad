"""How many weights ZeRO 3 has gathered at each moment of a micro-batch, by the rules of DeepSpeed's coordinator.

A module's weights are fetched before it runs and let go after it, each way, unless they are used again within
`GATHERED` weights. While fewer than `GATHERED` are there, those that come next are fetched ahead, a bucket at a time;
the last of a bucket may be of any size, so the limit is passed by up to the largest weight (an embedding of a large
vocabulary). What is computed again for the backward pass saves the weights that it used, whatever DeepSpeed lets go.
The order of modules is known: that of the micro-batch before.

Upstream: deepspeed/runtime/zero/partitioned_param_coordinator.py (DeepSpeed 0.19).
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from torchtrain.distributed.zero import BUCKET, GATHERED

PERSISTENT = 100_000  # weights of a parameter that stays whole; stage3_param_persistence_threshold


class Use(NamedTuple):
    """A module is about to run, forward or backward, or has done so."""

    begins: bool
    module: int
    parameters: tuple[int, ...]  # its own; which of all
    again: bool = False  # forward, for a backward pass that needs its activations anew
    backward: bool = False


def count_gathered(uses: Sequence[Use], sizes: Sequence[int], most: int = GATHERED, bucket: int = BUCKET) -> list[int]:
    """Return how many weights are whole on a rank after each use, from before the first on.

    Args:
        uses: of a micro-batch, in order.
        sizes: how many weights each parameter has.
        most, bucket: as `torchtrain.distributed.zero` gives them to DeepSpeed.
    """
    uses = [use._replace(parameters=tuple(p for p in use.parameters if sizes[p] > PERSISTENT)) for use in uses]
    order = [use for use in uses if use.begins]
    queue = deque((p, turn) for turn, use in enumerate(order) for p in sorted(use.parameters))
    fetched_for: dict[int, int] = defaultdict(lambda: -1)  # a parameter's last use that the queue has passed
    users: dict[int, set[int]] = defaultdict(set)
    there: set[int] = set()
    arriving: dict[int, set[int]] = {}  # what was fetched together, until all of it has been waited for
    times: dict[int, int] = defaultdict(int)  # how often a parameter was gathered
    saved: dict[tuple[int, int], int] = {}  # by module and parameter: which time's weights a module has saved
    held = sum(size for size in sizes if size <= PERSISTENT)
    turn, available, counts = 0, 0, [held]
    for begins, module, parameters, again, backward in uses:
        if begins:
            for p in parameters:
                users[p].add(module)
                if p not in there:
                    there.add(p)
                    times[p] += 1
                    available += sizes[p]
                if again:
                    saved[module, p] = times[p]
                if p in arriving:
                    arriving.pop(p)
            passed, waiting = set(), {p for p in parameters if fetched_for[p] < turn}
            while queue and len(passed) < len(waiting):
                p, last = queue.popleft()
                fetched_for[p] = last
                passed.add(p)
            room, ahead = min(most - available, bucket), set()
            while queue and sum(sizes[p] for p in ahead) < room:
                p, last = queue.popleft()
                fetched_for[p] = max(fetched_for[p], last)
                if p not in there:
                    ahead.add(p)
            there |= ahead
            for p in ahead:
                times[p] += 1
            available += sum(sizes[p] for p in ahead)
            arriving |= {p: ahead for p in ahead if len(ahead) > 1}
            turn += 1
        else:
            leaving = {p for p in parameters if fetched_for[p] <= turn}
            passed_by = 0
            for use in order[turn:]:
                if passed_by >= most or not leaving:
                    break
                leaving -= set(use.parameters)
                passed_by += sum(sizes[p] for p in use.parameters)
            for p in parameters:
                users[p].discard(module)
                if backward:
                    saved.pop((module, p), None)
                if p in leaving and p in there and not users[p]:
                    there.remove(p)
                    available -= sizes[p]
        # What came together lies there twice from when the first of it is used until the last is.
        together = {id(group): group for group in arriving.values()}.values()
        twice = sum(sum(sizes[p] for p in group) for group in together if not group <= arriving.keys())
        gone = {(p, time) for (_, p), time in saved.items() if p not in there or times[p] != time}
        counts.append(held + available + twice + sum(sizes[p] for p, _ in gone))
    return counts
