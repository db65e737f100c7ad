"""How many threads a process computes with on the host: torchrun sets one, and an optimizer kept in host memory would
run on one core.
"""

import torch

from anchorline.environment import usable_cores
from torchtrain.config import DistributedConfig
from torchtrain.distributed.world import here_beside


def share_cores(distributed: DistributedConfig, device: torch.device) -> str | None:
    """Give this process its share of the machine's cores where the optimizer's step runs on them, on a machine with
    GPUs.

    AdamW treats each number alone, so its bits do not depend on it. On a CPU the model's sums would, and nothing is
    changed.

    Returns:
        What was done, for people; None where nothing was.
    """
    if distributed.offload == "none" or device.type != "cuda":
        return None
    cores, processes = usable_cores(), here_beside()
    before, threads = torch.get_num_threads(), max(1, cores // processes)
    if threads == before:
        return None
    torch.set_num_threads(threads)
    return (
        f"{threads} for the optimizer in host memory, where there were {before}: {cores} cores, {processes} processes"
    )
