"""DeepSpeed's configuration, made from ours: no value of a run stands anywhere else."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from torchtrain.config import Config
from torchtrain.distributed.world import World

# Elements. DeepSpeed's own sizes (5e8, 1e9) reserve gigabytes before anything is trained. A parameter that is larger
# than a bucket goes alone.
BUCKET = 50_000_000
GATHERED = 500_000_000


def deepspeed_config(config: Config, world: World) -> dict[str, Any]:
    """Return the dictionary for `deepspeed.initialize`, for `distributed.zero_stage` 1 to 3.

    Gradients are summed in float32, between micro-batches and between ranks. The optimizer is ours (torch's AdamW, on
    the CPU too), and so is the learning rate.
    """
    distributed, train = config.distributed, config.train
    pinned = {"device": "cpu", "pin_memory": world.device.type == "cuda"}
    zero: dict[str, Any] = {
        "stage": distributed.zero_stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if distributed.offload != "none":
        zero["offload_optimizer"] = pinned
    if distributed.zero_stage == 3:
        zero |= {"stage3_prefetch_bucket_size": BUCKET, "stage3_max_live_parameters": GATHERED}
        zero["stage3_max_reuse_distance"] = GATHERED
        if distributed.offload == "all":
            zero["offload_param"] = pinned
    return {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.sequences_per_step // (train.micro_batch * world.data_parallel),
        "gradient_clipping": train.clip_norm or 0.0,
        # A gradient that is not finite leaves the weights as they are.
        "bf16": {
            "enabled": config.model.dtype == "bfloat16",
            "check_grad_overflow": True,
            # ZeRO 1 adds a gradient to the float32 sum as soon as it is there, and keeps no second set in bfloat16.
            "immediate_grad_update": True,
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


def gradient_divisor(config: Config, world: World) -> int:
    """Return what DeepSpeed divides a gradient by that it summed over all ranks.

    ZeRO 1 and 2 take the mean over data-parallel groups and the sum inside each. ZeRO 3 takes the mean over all ranks.
    """
    return world.size if config.distributed.zero_stage == 3 else world.data_parallel


@contextmanager
def leave_out(optimizer: Any) -> Iterator[None]:
    """Let a ZeRO optimizer find a norm that is not finite, so that its next step updates nothing and clears up.

    Each kind has its own place to say so (DeepSpeed 0.19: runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py).
    """
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # stage 1 in bfloat16
        optimizer.fp32_groups_gradients_flat[0].fill_(float("nan"))
        yield
        return
    cut = hasattr(optimizer, "fp32_partitioned_groups_flat")
    name, found = ("_get_norm_groups", [torch.tensor(-1.0)]) if cut else ("scaled_global_norm", torch.tensor(-1.0))
    setattr(optimizer, name, lambda *_, **__: found)
    try:
        yield
    finally:
        delattr(optimizer, name)


def forget_left_out(optimizer: Any) -> None:
    """Clear what stages 1 and 2 with an offloaded optimizer keep of a step left out, and would add to the next."""
    for group in getattr(optimizer, "averaged_gradients", {}):
        optimizer.averaged_gradients[group] = None


@contextmanager
def gather_whole(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Let ZeRO 3, which is set up in the block, gather each of these layers at once.

    DeepSpeed gathers each module of a layer by hooks of its own, and torch.compile stops at every hook. A "leaf" has no
    hooks within. DeepSpeed sends a leaf's gradients when the layer's backward pass ends, which a compiled layer reports
    too early. So each gradient is sent as soon as it is there, as those of other modules are.
    """
    for layer in layers:
        layer._z3_leaf = True  # pyright: ignore[reportArgumentType]
    with patch("deepspeed.runtime.zero.stage3.z3_leaf_parameter", lambda parameter: False):
        yield


def import_deepspeed() -> Any:
    """Import DeepSpeed without what it would compile: an operation for sums on a CPU (a minute and a half), and Muon.

    ZeRO imports its Muon whichever optimizer is used; that calls torch.compile, which loads Inductor (1.6 s a process).
    """
    # torch 2.13 renamed two collectives; DeepSpeed 0.19 calls them by their old names, once per layer.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.compiler

    with patch.object(deepspeed.runtime.compiler, "compile", lambda: lambda function: function):
        import deepspeed.runtime.zero.muon.original_muon

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # pyright: ignore[reportAttributeAccessIssue]
    return deepspeed
