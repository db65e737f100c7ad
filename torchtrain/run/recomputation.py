"""`model.activation_checkpointing: auto`: of layers as little is recomputed as free memory allows.

The same numbers come out either way. All processes do as the one with least memory must.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtrain.config import Config, ModelConfig, Recomputation
from torchtrain.distributed.world import World, here_beside
from torchtrain.modeling.kept_attention import can_keep

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of what is free; the rest is for what `torchtrain.planning` does not count: Python and its packages, a kernel's own
# buffers, and fragments.
_SHARE = 0.85
_GIB = 2**30


_SAID: dict[Recomputation, str] = {
    False: "none recomputed",
    "keep_attention": "recomputed in the backward pass, but for attention",
    True: "recomputed in the backward pass",
}


def choose_recomputation(
    config: Config, model_config: "PretrainedConfig", engine: str, world: World
) -> tuple[ModelConfig, str]:
    """Return the model's settings with `auto` decided, and what was chosen in words; empty where nothing was.

    Args:
        config: the run's.
        model_config: what `torchtrain.modeling.rope.extend` returned.
        engine: of attention.
        world: this rank's place.
    """
    if config.model.activation_checkpointing != "auto":
        return config.model, ""
    from torchtrain.planning import budget

    shapes, free = budget.Shapes(model_config), free_memory(world.device)

    def bytes_with(recomputation: Recomputation) -> int:
        model = config.model.model_copy(update={"activation_checkpointing": recomputation})
        needed = budget.memory(config.model_copy(update={"model": model}), shapes, world.size)
        return needed.gpu if world.device.type == "cuda" else needed.gpu + needed.host // world.size

    def fits(recomputation: Recomputation) -> bool:
        (fitting,) = world.sum([float(bytes_with(recomputation) <= _SHARE * free)])
        return fitting == world.size

    chosen: Recomputation = True
    if fits(False):
        chosen = False
    elif can_keep(engine) and fits("keep_attention"):
        chosen = "keep_attention"
    found = f"{free / _GIB:.1f} GiB are free" if free else "how much is free is not told here"
    said = f"{_SAID[chosen]}: keeping them takes {bytes_with(False) / _GIB:.1f} GiB, {found}"
    return config.model.model_copy(update={"activation_checkpointing": chosen}), said


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process could still take: of its GPU, or its share of the host's memory.

    On a host it is what Linux calls available, or what is left of a container's limit; 0 where neither is told.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    told = [left for left in (_available(Path("/proc/meminfo")), _left_of_limit(Path("/sys/fs/cgroup"))) if left >= 0]
    return min(told, default=0) // here_beside()


def _available(path: Path) -> int:
    """Bytes by /proc/meminfo; -1 where it does not tell."""
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return -1


def _left_of_limit(folder: Path) -> int:
    """Bytes until a control group's limit (version 2), what it can let go counted as free; -1 where it has none."""
    try:
        most, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + int(kept["inactive_file"])
    except (OSError, LookupError, ValueError):  # no such file; or "max"
        return -1
