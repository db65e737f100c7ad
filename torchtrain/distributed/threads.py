"""The threads that a process computes with on the host: torchrun sets one, and torch alone takes also cores that a
container's quota excludes.
"""

import torch

from anchorline.environment import usable_cores
from torchtrain.config import DistributedConfig
from torchtrain.distributed.world import read_local_size


def share_cores(distributed: DistributedConfig, device: torch.device) -> str | None:
    """Set torch's threads to this process's share of the cores; return a message, or None if nothing changed. On a CPU
    the share is a limit; with GPUs it is set where the optimizer's step runs on the host, whose bits do not depend on
    it.
    """
    cores, processes = usable_cores(), read_local_size()
    before, share = torch.get_num_threads(), max(1, cores // processes)
    if device.type == "cpu":
        if share >= before:
            return None
        torch.set_num_threads(share)
        return f"{share}, instead of {before}: {cores} cores for {processes} processes"
    if distributed.offload == "none" or share == before:
        return None
    torch.set_num_threads(share)
    return f"{share} for the optimizer in host memory, instead of {before}: {cores} cores, {processes} processes"
