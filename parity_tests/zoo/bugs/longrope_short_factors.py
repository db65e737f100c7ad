"""LongRoPE's short factors are used at every length."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _always_short(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters = rotary.config.rope_parameters
    if parameters["rope_type"] != "longrope":
        return inv_freq_C
    C = inv_freq_C.shape[0]
    factor_C = torch.tensor(parameters["short_factor"], device=inv_freq_C.device)
    return parameters["rope_theta"] ** -(torch.arange(C, device=inv_freq_C.device) / C) / factor_C


BUG = Bug(
    what="LongRoPE's short factors beyond the original length",
    where="Phi-3 and Phi-4 ports: vLLM PR 27431, MLC-LLM PR 3375, mlxcel issue 1358 choose one list for all lengths",
    stage="forward",
    apply=lambda: frequencies(_always_short),
    likely={"rope": "longrope"},
)
