"""How much memory this process could still take."""

from pathlib import Path

import torch

from torchtrain.distributed.world import here_beside


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
