"""`torchtrain bench memory`: the longest context that GPUs of some size hold, by what `torchtrain plan` counts.

Nothing is run. Memory is counted at a few lengths, each four times the one before. What a GPU holds is the most of many
moments, each with a part that grows with the length and one that does not; so a straight line between two counted
lengths lies above what is held between them, and a context found on it fits. `budget.RESERVE` is left free.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from anchorline.errors import UserError
from torchtrain.bench.config import BenchConfig
from torchtrain.bench.measure import Clock
from torchtrain.config import MOST_TOKENS, Config
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.planning import budget

# What is switched on, each with all before it.
WAYS: dict[str, dict[str, dict[str, Any]]] = {
    "none": {"model": {"activation_checkpointing": True}, "distributed": {"zero_stage": 3}},
    "optimizer": {"distributed": {"offload": "optimizer"}},
    "all": {"distributed": {"offload": "all"}},
    "chunks": {"model": {"layer_chunk": budget.LAYER_CHUNK}},
    "activations": {"model": {"activation_checkpointing": "offload"}},
}
FIRST, LAST = 2048, 2**21  # tokens of a rank's part at the first and the last length that is counted
_ROUND = 1024


def measure_memory(
    config: BenchConfig, clock: Clock, say: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Count. Arguments and result as `measure_attention`; the clock is not used."""
    rows = list[dict[str, Any]]()
    for name in config.memory.models:
        shapes = budget.Shapes(budget.model_config(config_of(config, name, MOST_TOKENS, {}, 1)))
        for processes in config.memory.processes:
            shared = max(s for s in range(1, processes + 1) if _can_share(config, name, s, processes, shapes))
            found = [{"model": name, "processes": processes, "gib": gib, "shared": shared} for gib in config.memory.gib]
            settings = dict[str, dict[str, Any]]()
            for way, changes in WAYS.items():
                settings = {key: settings.get(key, {}) | changes.get(key, {}) for key in ("model", "distributed")}
                say(f"counting {name} on {processes}: {way}")
                points = count_points(config, name, settings, shapes, processes, shared)
                for row in found:
                    row[way] = longest(points, row["gib"] * budget.GIB - budget.RESERVE)
            rows += found
            keep({"rows": rows})
    return {"rows": rows}


def count_points(
    config: BenchConfig, name: str, settings: dict[str, Any], shapes: budget.Shapes, processes: int, shared: int
) -> list[tuple[int, int]]:
    """Return (tokens of a row, bytes of a GPU) at growing lengths, until it is more than any GPU has."""
    tokens, points = FIRST * shared, list[tuple[int, int]]()
    while True:
        asked = config_of(config, name, tokens, settings, shared)
        points.append((tokens, budget.count_memory(asked, shapes, processes).gpu))
        if points[-1][1] > max(config.memory.gib) * budget.GIB or tokens >= min(LAST * shared, MOST_TOKENS):
            return points
        tokens = min(4 * tokens, MOST_TOKENS // shared * shared)


def longest(points: list[tuple[int, int]], limit: float) -> int | None:
    """Return the longest context on the lines through the points, in steps of 1,024 tokens; None: none fits."""
    found = None
    for (before, less), (after, more) in pairwise(points):
        if less <= limit:
            found = after if more <= limit else int(before + (after - before) * (limit - less) / (more - less))
    return None if found is None else found // _ROUND * _ROUND


def _can_share(config: BenchConfig, name: str, shared: int, processes: int, shapes: budget.Shapes) -> bool:
    asked = config_of(config, name, FIRST * shared, {"distributed": {"zero_stage": 3}}, shared)
    try:
        check_layout(asked, processes)
        check_heads(asked, shapes.config)
    except UserError:
        return False
    return True


def config_of(config: BenchConfig, name: str, length: int, settings: dict[str, Any], shared: int) -> Config:
    """Return a run's config: one row at a time on each group of `shared` ranks."""
    return Config.model_validate(
        {
            "run": {"folder": "unused"},
            "model": {"source": name} | settings.get("model", {}),
            "rope": {"type": "ntk"},
            "data": config.data.model_dump(),
            "pack": {"sequence_length": length},
            "train": {"sequences_per_step": max(config.memory.processes)},
            "distributed": {"sequence_parallel": shared} | settings.get("distributed", {}),
            "save": {"every": 0},
        }
    )
