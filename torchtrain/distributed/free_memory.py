"""How much memory this process can still take."""

from pathlib import Path

import torch

from torchtrain.distributed.world import read_local_size


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can still take, of its GPU or its share of the host's memory; 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    known = [free for free in (_available(Path("/proc/meminfo")), _left_of_limit(Path("/sys/fs/cgroup"))) if free >= 0]
    return min(known, default=0) // read_local_size()


def _available(path: Path) -> int:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, LookupError, ValueError):
        return -1


def _left_of_limit(folder: Path) -> int:
    """Return the bytes up to a control group's limit (version 2), with reclaimable cache; -1 if there is no limit."""
    try:
        most, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return most - used + int(kept["inactive_file"])
    except (OSError, LookupError, ValueError):  # no such file; or "max"
        return -1
