"""ZeRO 3 from the first weight on: each is cut up among the ranks as soon as it is read.

DeepSpeed cuts up a model that is whole on every rank, or one that is built inside `zero.Init`, whose weights it then
leaves as they came. Here weights are read by whoever reads them (`torchtrain.modeling.load`) and handed over one at a
time, so no rank ever holds more than its own part and the weight at hand. Each rank keeps its part of what it read
itself; nothing is sent.

Upstream: deepspeed/runtime/zero/partition_parameters.py (DeepSpeed 0.19).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from torchtrain.config import Config
from torchtrain.distributed.world import World
from torchtrain.distributed.zero import deepspeed_config, import_deepspeed


class Cutter:
    """Cuts weights up as DeepSpeed's engine for ZeRO 3 would, before there is an engine.

    Args:
        config: the run's, with `distributed.zero_stage` 3.
        world: this rank's place, joined.
    """

    def __init__(self, config: Config, world: World) -> None:
        self.world = world
        self._dtype: torch.dtype = getattr(torch, config.model.dtype)
        deepspeed = import_deepspeed()
        deepspeed.init_distributed(verbose=False)
        with redirect_stdout(StringIO()):
            # Of a module without weights: what it sets up for those that come (and for `F.linear`) is what counts.
            self._init: Any = deepspeed.zero.Init(nn.Module(), config_dict_or_path=deepspeed_config(config, world))

    def cut(self, parameter: nn.Parameter) -> None:
        """Leave of a whole parameter this rank's part, in the run's dtype, where the config keeps it."""
        assert not self.is_cut(parameter), "a parameter is cut up once"
        whole = parameter.data.to(self._dtype)
        parameter.data = whole
        self._init._convert_to_deepspeed_param(parameter)
        parameter.partition()  # pyright: ignore[reportAttributeAccessIssue]
        parameter.data = parameter.data.to(self.world.device)  # it is empty, and says where it will be whole

    def cut_rest(self, model: nn.Module) -> None:
        """Cut up each parameter of a model that is whole."""
        for parameter in model.parameters():
            if not self.is_cut(parameter):
                self.cut(parameter)

    def is_cut(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is cut up."""
        return hasattr(parameter, "ds_shape")

    def own_part(self, parameter: Any) -> Tensor:
        """Return this rank's part [n] of a parameter, without what fills the last one up."""
        part: Tensor = parameter.ds_tensor
        start = part.numel() * parameter.ds_zero_partition_rank
        return part[: max(0, min(part.numel(), parameter.ds_numel - start))]

    @contextmanager
    def whole_where_used(self, model: nn.Module) -> Iterator[None]:
        """Let a model run in the block: a module's own weights are whole during its forward, and each once more for as
        long as the backward pass needs it.

        All ranks must run it alike.
        """
        gathered: dict[int, nn.Parameter] = {}  # by the address of what is whole just now

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
            parameter.partition()  # which lets go of it; the view holds it until it is used
            return whole

        with ExitStack() as hooks:
            for module in model.modules():
                hooks.enter_context(module.register_forward_pre_hook(gather))
                hooks.enter_context(module.register_forward_hook(release, always_call=True))
            hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, unpack))
            yield
