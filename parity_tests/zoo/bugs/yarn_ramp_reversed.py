"""YaRN keeps the slow pairs and interpolates the fast ones: the ramp between is read from the wrong end."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _reverse(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters = rotary.config.rope_parameters
    if parameters["rope_type"] != "yarn":
        return inv_freq_C
    C = inv_freq_C.shape[0]
    kept_C = parameters["rope_theta"] ** -(torch.arange(C, device=inv_freq_C.device) / C)
    interpolated_C = kept_C / parameters["factor"]
    return kept_C + interpolated_C - inv_freq_C  # the two blends of a ramp and of its reverse add up to this


BUG = Bug(
    what="YaRN's ramp reversed",
    where="seen in reviews of ports: mask and 1 - mask change places between the paper's code and transformers'",
    stage="forward",
    apply=lambda: frequencies(_reverse),
    likely={"rope": "yarn"},
)
