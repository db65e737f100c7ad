"""Which layouts of processes are possible. Others are refused before a model or a corpus is loaded."""

from typing import TYPE_CHECKING

from anchorline.errors import UserError
from torchtrain.attention.masks import CARRY_A_STATE, layer_windows
from torchtrain.config import DistributedConfig, TrainConfig
from torchtrain.distributed.world import World

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def check_layout(distributed: DistributedConfig, train: TrainConfig, processes: int) -> None:
    """Check that groups that share a row divide the processes, and micro-batches a step. Raises UserError."""
    shared = distributed.sequence_parallel
    if processes % shared:
        raise UserError(
            f"distributed.sequence_parallel {shared}: does not divide {_processes(processes)}; start a multiple of "
            f"{shared} with torchrun --nproc_per_node N, or lower it"
        )
    data_parallel = processes // shared
    if train.sequences_per_step % (train.micro_batch * data_parallel):
        raise UserError(
            f"train.sequences_per_step {train.sequences_per_step}: no multiple of {train.micro_batch * data_parallel} "
            f"= train.micro_batch {train.micro_batch} x {data_parallel} rows at a time "
            f"({_processes(processes)} / distributed.sequence_parallel {shared}); change one of them"
        )


def check_heads(distributed: DistributedConfig, model_config: "PretrainedConfig") -> None:
    """Check that the attention heads divide among the ranks that share a row.

    Fewer key/value heads than ranks are repeated, if their number divides the ranks. Raises UserError: the heads do not
    divide, or the model's layers cannot be shared.
    """
    shared = distributed.sequence_parallel
    if shared == 1:
        return
    text_config = model_config.get_text_config()
    if getattr(text_config, "kv_lora_rank", None) is not None:  # multi-head latent attention; DeepSpeed has one size
        raise UserError(
            f"distributed.sequence_parallel {shared}: {text_config.model_type} has keys and values of different sizes "
            "(kv_lora_rank), which ranks do not exchange; set it to 1"
        )
    kinds = [kind for kind in getattr(text_config, "layer_types", None) or () if kind in CARRY_A_STATE]
    if kinds:
        raise UserError(
            f"distributed.sequence_parallel {shared}: {model_config.model_type} has layers that carry a state through "
            f"a row ({kinds[0]}), which ranks do not exchange; set it to 1"
        )
    if distributed.share == "documents" and set(layer_windows(model_config)) != {None}:
        raise UserError(
            f"distributed.share documents: {model_config.model_type} has sliding windows, which count tokens of the "
            "whole row; set it to heads"
        )
    heads, kv_heads = (getattr(text_config, f"num_{name}_heads", None) for name in ("attention", "key_value"))
    if heads is None or kv_heads is None:
        raise UserError(
            f"distributed.sequence_parallel {shared}: {model_config.model_type} names no num_attention_heads and "
            "num_key_value_heads in its config.json and is not supported; set it to 1"
        )
    if heads % shared:
        raise UserError(
            f"distributed.sequence_parallel {shared}: does not divide the model's {heads} attention heads; choose a "
            "divisor"
        )
    if kv_heads % shared and shared % kv_heads:
        raise UserError(
            f"distributed.sequence_parallel {shared}: the model's {kv_heads} key/value heads can neither be divided "
            f"among nor repeated for as many ranks; choose a divisor or a multiple of {kv_heads}"
        )


def describe(distributed: DistributedConfig, train: TrainConfig, world: World) -> str:
    """Return a line about how a step is spread over the processes."""
    rows = train.micro_batch * world.data_parallel
    shared = f", each shared by {world.sequence_parallel}" if world.sequence_parallel > 1 else ""
    shared += ", by whole documents where they divide evenly" if shared and world.whole_documents else ""
    turns = train.sequences_per_step // rows
    spread = ("nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and weights")
    kept = {"none": "", "optimizer": "; optimizer state", "all": "; optimizer state and weights"}[distributed.offload]
    return (
        f"{rows} rows at a time{shared}, {turns} times a step; {spread[distributed.zero_stage]} spread over all"
        f"{kept}{' in host memory' if kept else ''}"
    )


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
