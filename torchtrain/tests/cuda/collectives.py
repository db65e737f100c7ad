"""NCCL's stand-in: `init_process_group("nccl")` on the stand-in for CUDA. The host's memory, sent by gloo.

It refuses what NCCL refuses: tensors that are not on this process's device.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

NAME = "nccl_standin"


class Collectives(dist.ProcessGroup):
    """Gloo on the memory of CUDA tensors."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.CUSTOM, self._gloo)

    def getBackendName(self) -> str:
        return NAME

    @property
    def pg_name(self) -> str:
        return self.group_name

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()


def _send(name: str) -> Any:
    def collective(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._gloo, name)(*tree_map_only(torch.Tensor, _host, args), **kwargs)

    return collective


def _send_each(name: str) -> Any:
    """What gloo cannot send together."""

    def collective(self: Collectives, outputs: Any, inputs: Any, *opts: Any) -> Any:
        works = [getattr(self, name)(*pair) for pair in zip(outputs, inputs, strict=True)]
        for work in works:
            work.wait()
        return works[-1]

    return collective


def _host(x: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda or x.device.index != torch.cuda.current_device():
        raise RuntimeError(f"NCCL: a tensor on {x.device}; this process sends from cuda:{torch.cuda.current_device()}")
    return torch.ops.standin.host(x.detach())


# torch 2.13 has a second name for some, which it uses itself.
_OTHER_NAMES = {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
}
for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "gather"),
    *("scatter", "reduce_scatter", "alltoall", "send", "recv", *_OTHER_NAMES),
):
    setattr(Collectives, _name, _send(_name))
    setattr(Collectives, _OTHER_NAMES.get(_name, _name), _send(_name))
for _name in ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"):
    setattr(Collectives, _name, _send_each("_allgather_base"))
for _name in ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"):
    setattr(Collectives, _name, _send_each("_reduce_scatter_base"))


def install() -> None:
    """Let processes meet by this wherever they ask for NCCL."""
    dist.Backend.register_backend(NAME, Collectives, devices=["cuda"])
    real = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, device_id: Any = None, **kwargs: Any) -> None:
        real(NAME if backend == "nccl" else backend, *args, **kwargs)

    dist.init_process_group = init_process_group  # type: ignore[assignment]
