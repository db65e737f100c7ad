"""A Llama 3.1 checkpoint run with plain RoPE: the config's scaling is parsed and never read."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _keep(rotary, inv_freq_C: Tensor) -> Tensor:
    if rotary.config.rope_parameters["rope_type"] != "llama3":
        return inv_freq_C
    C = inv_freq_C.shape[0]
    return rotary.config.rope_parameters["rope_theta"] ** -(torch.arange(C, device=inv_freq_C.device) / C)


BUG = Bug(
    what="llama3 scaling ignored",
    where=(
        "mlxcel issue 1355, felafax issue 59, tiny-vllm PR 1, mlir-air PR 1948: short prompts look "
        "right, long ones fall apart"
    ),
    stage="forward",
    apply=lambda: frequencies(_keep),
    likely={"rope": "llama3"},
)
