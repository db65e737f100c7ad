"""`model.activation_checkpointing: auto`: layers are recomputed where free memory does not hold what they would keep.

The same numbers come out either way. All processes do as the one with least memory must.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtrain.config import Config, ModelConfig
from torchtrain.distributed.world import World, here_beside

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Of what is free; the rest is for what `torchtrain.planning` does not count: Python and its packages, a kernel's own
# buffers, and fragments.
_SHARE = 0.85
_GIB = 2**30


def choose_recomputation(config: Config, model_config: "PretrainedConfig", world: World) -> tuple[ModelConfig, str]:
    """Return the model's settings with `auto` decided, and what was chosen in words; empty where nothing was.

    Args:
        config: the run's.
        model_config: what `torchtrain.modeling.rope.extend` returned.
        world: this rank's place.
    """
    if config.model.activation_checkpointing != "auto":
        return config.model, ""
    from torchtrain.planning import budget

    model = config.model.model_copy(update={"activation_checkpointing": False})
    needed = budget.memory(config.model_copy(update={"model": model}), budget.Shapes(model_config), world.size)
    free = free_memory(world.device)
    bytes_needed = needed.gpu if world.device.type == "cuda" else needed.gpu + needed.host // world.size
    (fitting,) = world.sum([float(bytes_needed <= _SHARE * free)])
    fits = fitting == world.size
    chosen = config.model.model_copy(update={"activation_checkpointing": not fits})
    what = "none recomputed" if fits else "recomputed in the backward pass"
    found = f"{free / _GIB:.1f} GiB are free" if free else "how much is free is not told here"
    return chosen, f"{what}: keeping them takes {bytes_needed / _GIB:.1f} GiB, {found}"


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
