"""`torchtrain bench memory`: the longest context that GPUs of some size hold, by what `torchtrain plan` counts.

Nothing is run: shapes without numbers, for each way of spreading a step. What a GPU holds is the most of many moments,
and what it holds at each has a part that grows with the length and one that does not. So a straight line between two
lengths that were counted lies above what is held between them, and a context found on it fits. Beyond the last length
counted the last line goes on, which a result tells. The CUDA context, NCCL and the allocator's fragments come on top
(docs/running.md).
"""

import json
import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from anchorline.errors import UserError
from torchtrain.bench.clock import Clock
from torchtrain.bench.config import BenchConfig, ExplainedMemory
from torchtrain.bench.record import BenchRecord
from torchtrain.config import MOST_TOKENS, Config, LoraSettings
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.planning import budget

OFFLOADS = ("none", "optimizer", "all")
# What is switched on, each with all before it; ever more goes to the hosts, or is computed in smaller parts.
WAYS = (*OFFLOADS, "chunks", "activations")
FIRST = 8192  # tokens of a rank's part at the first length that is counted; each other is four times the one before
LORA = "adapters"  # what is trained, where a row says that; else every weight is
LEAST, LAST = 3, 2**19  # how many lengths are counted at least; tokens of a part beyond which no more are
_ROUND = 1024

Points = list[tuple[int, int, int]]  # tokens of a row, bytes of a GPU, bytes of all hosts


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
        for lora in (None, config.memory.lora) if config.memory.lora is not None else (None,):
            for processes in config.memory.processes:
                rows += _search(config, name, processes, lora, shapes, record, say)
    asked = config.memory.explained
    if asked is None:
        return {"rows": rows, "explained": None}
    say(f"counting what {asked.model} holds of {asked.tokens:,} tokens on {asked.processes}")
    return {"rows": rows, "explained": record.once({"explained": asked.model_dump()}, partial(_explain, config, asked))}


def _explain(config: BenchConfig, asked: ExplainedMemory) -> dict[str, Any]:
    """Tell what a GPU holds with everything switched on, at the moment at which it holds most."""
    shapes = budget.Shapes(budget.model_config(config_of(config, asked.model, asked.tokens, {})))
    way = ways_of(config, asked.model, asked.processes, None, shapes)[WAYS[-1]]
    run = config_of(config, asked.model, asked.tokens, way)
    held = budget.count_memory(run, shapes, asked.processes)
    alive = Counter[tuple[str, str]]()
    for one in shapes.run(run).alive:
        alive[str(list(one.shape)), one.dtype] += one.size
    return {
        "way": tell(way),
        "gpu": held.gpu,
        "hosts": held.hosts,
        "parts": {"weights, gathered": held.weights, "gradients": held.gradients, "optimizer": held.optimizer},
        "activations": held.activations,
        "alive": [{"shape": shape, "dtype": dtype, "bytes": size} for (shape, dtype), size in alive.most_common(8)],
    }


def _search(
    config: BenchConfig,
    name: str,
    processes: int,
    lora: LoraSettings | None,
    shapes: budget.Shapes,
    record: BenchRecord,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    trained = {} if lora is None else {"trained": LORA, "lora": lora.model_dump()}
    rows = [{"model": name, "processes": processes, "gib": gib, **trained} for gib in config.memory.gib]
    for which, way in ways_of(config, name, processes, lora, shapes).items():
        say(f"counting {name} on {processes}: {tell(way)}")
        key = {"model": name, "processes": processes, "way": way}
        counted: Points = record.once(key, partial(_count, config, name, way, shapes, processes))
        for row in rows:
            limit = row["gib"] * budget.GIB
            if limit >= counted[0][1]:
                row[which] = _follow(counted, limit, config.memory.longest)
            else:
                small = partial(_bisect, config, name, way, shapes, processes, limit, counted[0][0])
                row[which] = record.once(key | {"gib": row["gib"]}, small)
            row["shared"], row["counted"] = shared_in(way), counted[-1][0]
            row["hosts"] = None if row[which] is None else _line([(n, host) for n, _, host in counted], row[which])
    return rows


def _count(config: BenchConfig, name: str, way: dict[str, Any], shapes: budget.Shapes, processes: int) -> Points:
    """Return what is held at lengths of which each is four times the one before, until it is more than any GPU has."""
    shared, most = shared_in(way), max(config.memory.gib) * budget.GIB
    # Whole thousands for each rank; many ranks come to where the search stops before their parts are long.
    longest = max(config.memory.longest // (_ROUND * shared) * _ROUND, FIRST) * shared
    tokens, points = FIRST * shared, Points()
    while len(points) < (LEAST if not points or points[0][1] <= most else 2) or (
        points[-1][1] <= most and tokens <= LAST * shared
    ):
        held = budget.count_memory(config_of(config, name, tokens, way), shapes, processes)
        points.append((tokens, held.gpu, held.hosts))
        if tokens == longest:
            break
        tokens = min(tokens * 4, longest)
    return points


def _line(points: list[tuple[int, int]], tokens: int) -> int:
    """Return what two points, the nearest of those that lie before and after, say of a length."""
    pairs = list(pairwise(points))
    (before, less), (after, more) = next((pair for pair in pairs if tokens <= pair[1][0]), pairs[-1])
    return less + (more - less) * (tokens - before) // (after - before)


def _follow(points: Points, limit: float, most: int) -> int:
    """Return the longest context on the lines through the points, in steps of 1,024 tokens."""
    (tokens, held, _), slope = points[0], 0.0
    for (before, less, _), (after, more, _) in pairwise(points):
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
    if budget.count_memory(config_of(config, name, _ROUND, way), shapes, processes).gpu > limit:
        return None
    while most - least > 1:
        middle = (least + most) // 2
        held = budget.count_memory(config_of(config, name, middle * _ROUND, way), shapes, processes).gpu
        least, most = (middle, most) if held <= limit else (least, middle)
    return least * _ROUND or None


def ways_of(
    config: BenchConfig, name: str, processes: int, lora: LoraSettings | None, shapes: budget.Shapes
) -> dict[str, dict[str, Any]]:
    """Return what of a config each of `WAYS` sets; as many ranks share a row as the heads allow."""
    shared = max(s for s in range(1, processes + 1) if processes % s == 0 and _fits(config, name, s, processes, shapes))
    spread = {"zero_stage": 3} | ({"sequence_parallel": shared} if shared > 1 else {})
    adapters = {} if lora is None else {"lora": lora.model_dump()}
    recomputed = adapters | {"activation_checkpointing": True}
    ways = {offload: {"model": recomputed, "distributed": spread | {"offload": offload}} for offload in OFFLOADS}
    chunks = {"layer_chunk": budget.LAYER_CHUNK}
    everything = ways[OFFLOADS[-1]]
    return ways | {
        "chunks": everything | {"model": recomputed | chunks},
        "activations": everything | {"model": recomputed | chunks | {"activation_checkpointing": "offload"}},
    }


def shared_in(way: dict[str, Any]) -> int:
    """Return how many ranks share a row."""
    return way["distributed"].get("sequence_parallel", 1)


def _fits(config: BenchConfig, name: str, shared: int, processes: int, shapes: budget.Shapes) -> bool:
    asked = config_of(config, name, FIRST * shared, {"distributed": {"zero_stage": 3, "sequence_parallel": shared}})
    try:
        check_layout(asked, processes)
        check_heads(asked, shapes.config)
    except UserError:
        return False
    return True


def config_of(config: BenchConfig, name: str, length: int, way: dict[str, Any]) -> Config:
    """Return a run's config: one row at a time on each group of ranks that share it, with what a way sets."""
    return Config.model_validate(
        {
            "run": {"folder": "unused"},
            "model": {"source": name} | way.get("model", {}),
            "rope": {"type": "ntk"},
            "data": config.data.model_dump(),
            "pack": {"sequence_length": length},
            "train": {"sequences_per_step": max(config.memory.processes)},
            "distributed": way.get("distributed", {}),
            "save": {"every": 0},
        }
    )


def tell(way: dict[str, Any]) -> str:
    """Return the overrides of a config that choose a way."""

    def written(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value)

    return shlex.join(
        f"{section}.{name}={written(value)}" for section, values in way.items() for name, value in values.items()
    )
