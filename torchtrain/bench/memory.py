"""`torchtrain bench memory`: the longest context that GPUs of some size hold, by what `torchtrain plan` counts.

Nothing is run: shapes without numbers, for each way of spreading a step. What a GPU holds is counted at lengths that
double until three lie on a straight line, as they must (each tensor of a pass has a factor T or none), and the line is
followed from there. The CUDA context, NCCL and the allocator's fragments come on top (docs/running.md).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from anchorline.errors import UserError
from torchtrain.bench.clock import Clock
from torchtrain.bench.config import BenchConfig
from torchtrain.bench.record import Record
from torchtrain.config import MOST_TOKENS, Config
from torchtrain.distributed.layout import check_heads, check_layout
from torchtrain.planning import budget

OFFLOADS = ("none", "optimizer", "all")
_A_RANK = 8192  # tokens of a rank's part at the first length
_FACTORS = (1, 2, 4, 8, 16)
_ROUNDED = 2**20  # bytes: what is shared among ranks is rounded up, tensor by tensor
_ROUND = 1024


class Line(NamedTuple):
    """Bytes of a GPU at a length: `fixed` + `each` a token; and of all hosts together."""

    fixed: float
    each: float
    begins: int  # tokens
    hosts: int


def measure(config: BenchConfig, record: Record, clock: Clock, say: Callable[[str], None]) -> dict[str, Any]:
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
        shapes = budget.Shapes(budget.model_config(_config(config, name, MOST_TOKENS, {})))
        for processes in config.memory.processes:
            rows += _count(config, name, processes, shapes, record, say)
    return {"rows": rows}


def _count(
    config: BenchConfig,
    name: str,
    processes: int,
    shapes: budget.Shapes,
    record: Record,
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    rows = [{"model": name, "processes": processes, "gib": gib} for gib in config.memory.gib]
    for offload, way in _ways(config, name, processes, shapes).items():
        say(f"counting {name} on {processes}: {tell(way)}")
        key = {"model": name, "processes": processes, "way": way}
        line = Line(*record.once(key, partial(_line, config, name, way, shapes, processes)))
        for row in rows:
            limit, asked = row["gib"] * budget.GIB, key | {"gib": row["gib"]}
            row["way"], row["hosts"] = tell(way), line.hosts
            row[offload] = record.once(asked, partial(_longest, line, limit, config, name, way, shapes, processes))
    return rows


def _longest(
    line: Line,
    limit: float,
    config: BenchConfig,
    name: str,
    way: dict[str, Any],
    shapes: budget.Shapes,
    processes: int,
) -> int | None:
    """Return the longest context in steps of 1,024; None where not even that fits."""
    found = min(config.memory.longest, int((limit - line.fixed) / line.each)) // _ROUND
    if found * _ROUND >= line.begins:
        return found * _ROUND
    # Where the line does not reach: a pass of so few tokens is soon counted.
    least, most = 0, -(-line.begins // _ROUND)
    while most - least > 1:
        middle = (least + most) // 2
        held = budget.memory(_config(config, name, middle * _ROUND, way), shapes, processes).gpu
        least, most = (middle, most) if held <= limit else (least, middle)
    return least * _ROUND or None


def _line(config: BenchConfig, name: str, way: dict[str, Any], shapes: budget.Shapes, processes: int) -> Line:
    """Count at lengths that double until three of them lie on a line: below, something that has no factor T is most."""
    shared = way["distributed"].get("sequence_parallel", 1)
    lengths, held, hosts = list[int](), list[int](), 0
    for factor in _FACTORS:
        lengths.append(_A_RANK * shared * factor)
        memory = budget.memory(_config(config, name, lengths[-1], way), shapes, processes)
        held.append(memory.gpu)
        hosts = memory.hosts
        if len(held) < 3:
            continue
        each = (held[-1] - held[-2]) / (lengths[-1] - lengths[-2])
        if abs(held[-2] - held[-3] - each * (lengths[-2] - lengths[-3])) <= _ROUNDED:
            return Line(held[-1] - each * lengths[-1], each, lengths[-3], hosts)
    raise AssertionError(f"{name}, {way}: {held} at {lengths} are on no line")


def _ways(config: BenchConfig, name: str, processes: int, shapes: budget.Shapes) -> dict[str, dict[str, Any]]:
    """Return a way of spreading a step for each of `distributed.offload`; as many share a row as the heads allow."""
    shared = max(s for s in range(1, processes + 1) if processes % s == 0 and _fits(config, name, s, processes, shapes))
    split = {"sequence_parallel": shared} if shared > 1 else {}
    return {name: {"distributed": {"zero_stage": 3} | split | {"offload": name}} for name in OFFLOADS}


def _fits(config: BenchConfig, name: str, shared: int, processes: int, shapes: budget.Shapes) -> bool:
    asked = _config(config, name, _A_RANK * shared, {"distributed": {"zero_stage": 3, "sequence_parallel": shared}})
    try:
        check_layout(asked, processes)
        check_heads(asked, shapes.config)
    except UserError:
        return False
    return True


def _config(config: BenchConfig, name: str, length: int, way: dict[str, Any]) -> Config:
    """Return a run's config: one row a step and rank, recomputing each layer."""
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
