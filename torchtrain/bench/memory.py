"""`torchtrain bench memory`: the longest context that GPUs of some size hold, by what `torchtrain plan` counts.

Nothing is run: shapes without numbers, for each way of spreading a step. What a GPU holds is the most of many moments,
and what it holds at each has a part that grows with the length and one that does not. So a straight line between two
lengths that were counted lies above what is held between them, and a context found on it fits. Beyond the last length
counted the last line goes on, which a result tells. The CUDA context, NCCL and the allocator's fragments come on top
(docs/running.md).
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from anchorline.errors import UserError
from torchtrain.bench.clock import Clock
from torchtrain.bench.config import BenchConfig
from torchtrain.bench.record import BenchRecord
from torchtrain.config import MOST_TOKENS, Config
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.planning import budget

OFFLOADS = ("none", "optimizer", "all")
FIRST = 8192  # tokens of a rank's part at the first length that is counted; the others are twice the one before
LEAST, LAST = 3, 2**18  # how many lengths are counted at least; tokens of a row beyond which no more are
_ROUND = 1024

Points = list[tuple[int, int]]  # tokens of a row, bytes of a GPU


def measure(config: BenchConfig, record: BenchRecord, clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
    """Count, or go on counting.

    Args:
        config: what.
        record: what was counted before.
        clock: not asked.
        say: takes one line at a time on what begins.

    Returns:
        What the result holds besides its environment.
    """
    rows = list[dict[str, Any]]()
    for name in config.memory.models:
        shapes = budget.Shapes(budget.model_config(config_of(config, name, MOST_TOKENS, {})))
        for processes in config.memory.processes:
            rows += _search(config, name, processes, shapes, record, say)
    return {"rows": rows}


def _search(
    config: BenchConfig,
    name: str,
    processes: int,
    shapes: budget.Shapes,
    record: BenchRecord,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    rows = [{"model": name, "processes": processes, "gib": gib} for gib in config.memory.gib]
    for offload, way in ways_of(config, name, processes, shapes).items():
        say(f"counting {name} on {processes}: {tell(way)}")
        key = {"model": name, "processes": processes, "way": way}
        hosts, counted = record.once(key, partial(_count, config, name, way, shapes, processes))
        for row in rows:
            limit = row["gib"] * budget.GIB
            if limit >= counted[0][1]:
                row[offload] = _follow(counted, limit, config.memory.longest)
            else:
                small = partial(_bisect, config, name, way, shapes, processes, limit, counted[0][0])
                row[offload] = record.once(key | {"gib": row["gib"]}, small)
            row["way"], row["hosts"], row["counted"] = tell(way), hosts, counted[-1][0]
    return rows


def _count(
    config: BenchConfig, name: str, way: dict[str, Any], shapes: budget.Shapes, processes: int
) -> tuple[int, Points]:
    """Return the bytes of all hosts, and of a GPU at lengths that double, until more is held than any GPU has."""
    tokens, points, hosts = FIRST * way["distributed"].get("sequence_parallel", 1), Points(), 0
    most = max(config.memory.gib) * budget.GIB
    while len(points) < LEAST or (points[-1][1] <= most and tokens <= LAST):
        held = budget.memory(config_of(config, name, tokens, way), shapes, processes)
        points.append((tokens, held.gpu))
        tokens, hosts = 2 * tokens, held.hosts
    return hosts, points


def _follow(points: Points, limit: float, most: int) -> int:
    """Return the longest context on the lines through the points, in steps of 1,024 tokens."""
    (tokens, held), slope = points[0], 0.0
    for (before, less), (after, more) in pairwise(points):
        tokens, held, slope = before, less, (more - less) / (after - before)
        if more > limit:
            break
    found = tokens + (limit - held) / slope if slope else tokens
    return min(most, int(found)) // _ROUND * _ROUND


def _bisect(
    config: BenchConfig,
    name: str,
    way: dict[str, Any],
    shapes: budget.Shapes,
    processes: int,
    limit: float,
    too_long: int,
) -> int | None:
    """Return the longest context below the first that was counted; None where not even 1,024 tokens fit."""
    least, most = 0, too_long // _ROUND
    while most - least > 1:
        middle = (least + most) // 2
        held = budget.memory(config_of(config, name, middle * _ROUND, way), shapes, processes).gpu
        least, most = (middle, most) if held <= limit else (least, middle)
    return least * _ROUND or None


def ways_of(config: BenchConfig, name: str, processes: int, shapes: budget.Shapes) -> dict[str, dict[str, Any]]:
    """Return a way of spreading a step for each of `distributed.offload`; as many share a row as the heads allow."""
    shared = max(s for s in range(1, processes + 1) if processes % s == 0 and _fits(config, name, s, processes, shapes))
    split = {"sequence_parallel": shared} if shared > 1 else {}
    return {offload: {"distributed": {"zero_stage": 3} | split | {"offload": offload}} for offload in OFFLOADS}


def _fits(config: BenchConfig, name: str, shared: int, processes: int, shapes: budget.Shapes) -> bool:
    asked = config_of(config, name, FIRST * shared, {"distributed": {"zero_stage": 3, "sequence_parallel": shared}})
    try:
        check_layout(asked, processes)
        check_heads(asked, shapes.config)
    except UserError:
        return False
    return True


def config_of(config: BenchConfig, name: str, length: int, way: dict[str, Any]) -> Config:
    """Return a run's config: one row at a time on each group of ranks that share it, each layer computed again."""
    return Config.model_validate(
        {
            "run": {"folder": "unused"},
            "model": {"source": name, "activation_checkpointing": True},
            "rope": {"type": "ntk"},
            "data": config.data.model_dump(),
            "pack": {"sequence_length": length},
            "train": {"sequences_per_step": max(config.memory.processes)},
            "save": {"every": 0},
        }
        | way
    )


def tell(way: dict[str, Any]) -> str:
    """Return the overrides of a config that choose a way."""
    given = " ".join(f"distributed.{name}={value}" for name, value in way["distributed"].items())
    return f"model.activation_checkpointing=true {given}"
