"""DeepSpeed's configuration, made from ours, and changes of its behaviour."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from torchtrain.config import DistributedConfig, TrainConfig
from torchtrain.distributed.world import World

# Elements. DeepSpeed's defaults (5e8, 1e9) reserve gigabytes. A parameter larger than a bucket is sent alone.
BUCKET = 50_000_000
GATHERED = 500_000_000


def deepspeed_config(
    distributed: DistributedConfig, train: TrainConfig, dtype: torch.dtype, world: World
) -> dict[str, Any]:
    """Return the dictionary for `deepspeed.initialize`, for ZeRO 1 to 3, of a model of this dtype. Gradients are summed
    in float32 over micro-batches and ranks; the optimizer (torch's AdamW) and the learning rate are ours.
    """
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
        "bf16": {
            "enabled": dtype == torch.bfloat16,
            "check_grad_overflow": True,  # a gradient that is not finite changes no weight
            "immediate_grad_update": True,  # ZeRO 1 keeps no second set of gradients in bfloat16
        },
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "seq_parallel_communication_data_type": "fp32",
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


@contextmanager
def skip_update(optimizer: Any) -> Iterator[None]:
    """Make a ZeRO optimizer find a norm that is not finite, so that its step updates nothing and clears the gradients.

    Each stage has its own place for the norm (DeepSpeed 0.19: stage_1_and_2.py, stage3.py, bf16_optimizer.py).
    """
    if hasattr(optimizer, "fp32_groups_gradients_flat"):  # stage 1 in bfloat16
        optimizer.fp32_groups_gradients_flat[0].fill_(float("nan"))
        yield
        return
    stage_3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    name, norm = ("_get_norm_groups", [torch.tensor(-1.0)]) if stage_3 else ("scaled_global_norm", torch.tensor(-1.0))
    setattr(optimizer, name, lambda *_, **__: norm)
    try:
        yield
    finally:
        delattr(optimizer, name)


def clear_skipped_gradients(optimizer: Any) -> None:
    """Clear the gradients of a skipped step, which stages 1 and 2 with an offloaded optimizer would add to the next."""
    for group in getattr(optimizer, "averaged_gradients", {}):
        optimizer.averaged_gradients[group] = None


@contextmanager
def gather_layers_whole(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Make ZeRO 3, which is set up in the block, gather each of these layers at once.

    DeepSpeed gathers each module of a layer in a hook, and torch.compile breaks its graph at every hook. A "leaf" of
    DeepSpeed has no hooks inside. DeepSpeed reduces a leaf's gradients when the layer's backward pass ends, which a
    compiled layer reports too early. So each gradient is reduced as soon as it exists, as in other modules.
    """
    for layer in layers:
        layer._z3_leaf = True  # pyright: ignore[reportArgumentType]
    with patch("deepspeed.runtime.zero.stage3.z3_leaf_parameter", lambda parameter: False):
        yield


def import_deepspeed() -> Any:
    """Import DeepSpeed without compiling its CPU all-reduce (90 s) and its Muon optimizer.

    ZeRO imports Muon for every optimizer. Muon calls torch.compile, which loads Inductor (1.6 s a process).
    """
    # DeepSpeed 0.19 calls two collectives by names that torch 2.13 deprecates, once per layer.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.compiler

    with patch.object(deepspeed.runtime.compiler, "compile", lambda: lambda function: function):
        import deepspeed.runtime.zero.muon.original_muon

    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}  # pyright: ignore[reportAttributeAccessIssue]
    return deepspeed
