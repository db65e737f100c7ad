"""The base that every config once had, whatever this config says: f(theta) becomes f(10 theta)."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _ten_times_the_base(_: object, inv_freq_C: Tensor) -> Tensor:
    C = inv_freq_C.shape[0]
    return inv_freq_C * 10.0 ** -(torch.arange(C, device=inv_freq_C.device) / C)


BUG = Bug(
    what="theta off by a factor of 10",
    where=(
        "loaders that drop rope_theta and fall back to a default: koboldcpp issue 487 (CodeLlama), "
        "airllm issue 368 (Llama 3)"
    ),
    stage="forward",
    apply=lambda: frequencies(_ten_times_the_base),
)
