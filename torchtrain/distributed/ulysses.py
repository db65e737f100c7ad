"""Sequence parallelism: each rank holds a part of a row, and exchanges tokens for heads around every attention call.

DeepSpeed's `UlyssesSPAttentionHF` does the exchange. Inside it our attention function sees whole rows and this rank's
heads, so the plan is built once, from whole rows. Registration is global to the process and applies to all its models.

Upstream: deepspeed/runtime/sequence_parallel/ulysses_sp.py and parallel_state_sp.py (arXiv 2309.14509, 2506.13996).

Legend: B batch · t tokens of this rank's part · D head_dim.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtrain.attention.hf import APART, implementation_name
from torchtrain.attention.masks import read_mask, window_of
from torchtrain.attention.plan import AttentionPlan
from torchtrain.distributed.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SequenceParallelOnly:
    """DeepSpeed's sequence-parallel state without model parallelism.

    `parallel_state_sp` reports the ranks that share a row as model-parallel too. ZeRO 1 in bfloat16 then leaves all but
    the first of them out of the gradient's norm, and fails on the ranks where nothing is left.
    """

    def __init__(self, state: Any, own_group: Any) -> None:
        self._state, self._own_group = state, own_group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_model_parallel_rank(self) -> int:
        """Return 0."""
        return 0

    def get_model_parallel_world_size(self) -> int:
        """Return 1."""
        return 1

    def get_model_parallel_group(self) -> Any:
        """Return a group of this rank alone."""
        return self._own_group


def split_attention(
    model: "PreTrainedModel", engine: str, micro_batch: int, world: World
) -> SequenceParallelOnly | None:
    """Make the model's attention exchange tokens for heads, once in a process; return the `mpu` of
    `deepspeed.initialize`. Nothing happens if `world.sequence_parallel` is 1. Every forward has `micro_batch` rows.
    """
    if world.sequence_parallel == 1:
        return None
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = implementation_name(engine)
    local_attention = ALL_ATTENTION_FUNCTIONS[name]
    state: Any = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=name,
        sequence_parallel_size=world.sequence_parallel,
        micro_batch_size=micro_batch,
        seq_length_is_variable=True,
    )
    _pass_windows_and_sinks(name, local_attention, world.sequence_parallel, state.get_sequence_parallel_rank())
    own_group, _ = dist.new_subgroups(group_size=1)
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            _share_largest_position(module, state.get_sequence_parallel_group())
    return SequenceParallelOnly(state, own_group)


def _pass_windows_and_sinks(name: str, local_attention: Callable[..., Any], ranks: int, rank: int) -> None:
    """Pass what DeepSpeed leaves out: windows, this rank's sinks. local_attention: for ranks with whole documents."""
    from transformers import AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # The exchange is not compiled with the layer (`model.fused`), as the engine's own function is not.
    exchange: Any = torch.compiler.disable(ALL_ATTENTION_FUNCTIONS[name], reason=APART)

    def attend(
        module: nn.Module, q: Tensor, k: Any, v: Any, mask: Tensor | None, plan: AttentionPlan, **kwargs: Any
    ) -> Any:
        if plan.document_ids_BT.shape[1] == q.shape[2]:
            return local_attention(module, q, k, v, mask, plan=plan, **kwargs)
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"].chunk(ranks)[rank]
        return exchange(module, q, k, v, None, plan=plan, row_window=window_of(mask), **kwargs)

    ALL_ATTENTION_FUNCTIONS[name] = attend
    AttentionMaskInterface.register(name, partial(read_mask, ranks=ranks))


def _share_largest_position(rotary: nn.Module, group: Any) -> None:
    """Append the row's largest position, and cut it off tables again, for `longrope` and `dynamic`."""

    def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        position_ids_Bt: Tensor = kwargs.pop("position_ids") if "position_ids" in kwargs else args[1]
        largest = position_ids_Bt.max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        column_B1 = largest.expand(len(position_ids_Bt), 1)
        return args[:1], {**kwargs, "position_ids": torch.cat([position_ids_Bt, column_B1], dim=1)}

    def narrow(_: nn.Module, __: Any, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(table_BtD[:, :-1] for table_BtD in tables)

    rotary.register_forward_pre_hook(widen, with_kwargs=True)
    rotary.register_forward_hook(narrow)
