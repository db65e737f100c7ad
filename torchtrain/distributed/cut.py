"""ZeRO 3 while a model is loaded: each parameter is cut up among the ranks as soon as it is read.

DeepSpeed cuts up a model that is whole on every rank. Here `torchtrain.modeling.load` cuts up one weight at a time, so
a rank never holds more than its own parts and one whole weight. Nothing is sent.

Upstream: deepspeed/runtime/zero/partition_parameters.py (DeepSpeed 0.19).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.config import DistributedConfig, TrainConfig
from torchtrain.distributed.world import World
from torchtrain.distributed.zero import deepspeed_config, import_deepspeed


class Cutter:
    """Cuts parameters up as DeepSpeed's engine for ZeRO 3 does, before the engine exists."""

    def __init__(self, distributed: DistributedConfig, train: TrainConfig, dtype: torch.dtype, world: World) -> None:
        self.world, self._dtype = world, dtype
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(verbose=False)
        with redirect_stdout(StringIO()):
            # The module is empty: only the set-up (also of `F.linear`) for later parameters is needed.
            made = deepspeed_config(distributed, train, dtype, world)
            self._init: Any = deepspeed.zero.Init(nn.Module(), config_dict_or_path=made)

    def cut(self, parameter: nn.Parameter) -> None:
        """Replace a whole parameter by this rank's part, in the run's dtype, where the config keeps weights."""
        assert not self.is_cut(parameter), "a parameter is cut up once"
        parameter.data = parameter.data.to(self._dtype)
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # pyright: ignore[reportAttributeAccessIssue]
        parameter.data = parameter.data.to(self.world.device)  # empty; DeepSpeed gathers it on this device

    def cut_rest(self, model: nn.Module) -> None:
        """Cut up each parameter of a model that is still whole."""
        for parameter in model.parameters():
            if not self.is_cut(parameter):
                self.cut(parameter)

    def is_cut(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is cut up."""
        return hasattr(parameter, "ds_shape")

    def own_part(self, parameter: Any) -> Tensor:
        """Return this rank's part [n] of a parameter, without padding."""
        part: Tensor = parameter.ds_tensor
        start = part.numel() * parameter.ds_zero_partition_rank
        return part[: max(0, min(part.numel(), parameter.ds_numel - start))]

    @contextmanager
    def whole_where_used(self, model: nn.Module) -> Iterator[None]:
        """Run a model, on all ranks alike: a parameter is whole in its module's forward and where backward uses it."""
        gathered: dict[int, nn.Parameter] = {}  # parameters that are whole now, by address

        def gather(module: nn.Module, *_: Any) -> None:
            for parameter in module.parameters(recurse=False):
                parameter.all_gather()  # pyright: ignore[reportAttributeAccessIssue]
                gathered[parameter.untyped_storage().data_ptr()] = parameter

        def release(module: nn.Module, *_: Any) -> None:
            for parameter in module.parameters(recurse=False):
                gathered.pop(parameter.untyped_storage().data_ptr(), None)
                parameter.partition()  # pyright: ignore[reportAttributeAccessIssue]

        def pack(x: Tensor) -> Any:
            parameter = gathered.get(x.untyped_storage().data_ptr())
            return x if parameter is None else (parameter, x.size(), x.stride(), x.storage_offset())

        def unpack(packed: Any) -> Tensor:
            if isinstance(packed, Tensor):
                return packed
            parameter, *view = packed
            parameter.all_gather()
            whole = parameter.data.as_strided(*view)
            parameter.partition()  # `whole` keeps the storage until it is used
            return whole

        with ExitStack() as hooks:
            for module in model.modules():
                hooks.enter_context(module.register_forward_pre_hook(gather))
                hooks.enter_context(module.register_forward_hook(release, always_call=True))
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            yield
