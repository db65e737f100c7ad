"""How many threads a process computes with on the host.

On a machine with GPUs torchrun sets one, and an optimizer kept in host memory would run on one core. On a CPU torch
takes all cores that it sees, also those that a container's quota does not give.
"""

import torch

from anchorline.environment import usable_cores
from torchtrain.config import DistributedConfig
from torchtrain.distributed.world import here_beside


def share_cores(distributed: DistributedConfig, device: torch.device) -> str | None:
    """Give this process its share of the cores: on a CPU no more than that; with GPUs, where the optimizer's step runs
    on the host.

    AdamW treats each number alone, so its bits do not depend on it. On a CPU the model's sums do.

    Returns:
        What was done, for people; None where nothing was.
    """
    cores, processes = usable_cores(), here_beside()
    before, share = torch.get_num_threads(), max(1, cores // processes)
    if device.type == "cpu":
        if share >= before:
            return None
        torch.set_num_threads(share)
        return f"{share}, where torch took {before}: {cores} cores for {processes} processes"
    if distributed.offload == "none" or share == before:
        return None
    torch.set_num_threads(share)
    return f"{share} for the optimizer in host memory, where there were {before}: {cores} cores, {processes} processes"
