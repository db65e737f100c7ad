"""What DeepSpeed asks of a machine's accelerator, answered for the device of shapes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.nn import functional

from torchtrain.tests.shapes_only.device import DEVICE


class ShapesAccelerator(CPU_Accelerator):
    """A CPU's (no streams, no events) but for where things lie. Memory of the host is never pinned."""

    def device_name(self, device_index: Any = None) -> str:
        return DEVICE.type

    def current_device_name(self) -> str:
        return DEVICE.type

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.is_meta

    def memory_allocated(self, device_index: Any = None) -> int:
        return 0


@contextmanager
def deepspeed_on_shapes() -> Iterator[None]:
    """Let DeepSpeed take the device of shapes for the machine's accelerator."""
    from deepspeed.comm import comm
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.zero import linear, utils
    from deepspeed.utils import groups

    before = real_accelerator.ds_accelerator
    real_accelerator.set_accelerator(ShapesAccelerator())
    try:
        # What rank 0 says, as numbers that the device would have to hold.
        with (
            # Groups of ranks, which would outlast this one.
            patch.dict(vars(groups)),
            patch.dict(vars(comm)),
            patch.dict(vars(parallel_state_sp)),
            patch.object(functional, "linear", functional.linear),  # ZeRO 3 has its own, for good
            patch.object(linear, "get_accelerator", CPU_Accelerator),  # it asks for a name that torch.autocast knows
            patch.object(utils, "assert_lst_len_same_as_other_ranks", lambda given: None),
            patch.object(utils, "get_lst_from_rank0", lambda given: given),
        ):
            yield
    finally:
        real_accelerator.ds_accelerator = before
