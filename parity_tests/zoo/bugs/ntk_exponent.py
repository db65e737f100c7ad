"""The base times the factor, without the exponent d / (d - 2) that divides the slowest pair by the factor."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies, swap
from torchtrain.modeling.rope import extend, rotated_dimensions


def _static(config, rope, length):
    extended = extend(config, rope, length)
    if rope.type == "ntk":
        d, theta = rotated_dimensions(config), config.rope_parameters["rope_theta"]
        stretch = extended.rope_parameters["rope_theta"] / theta
        extended.rope_parameters["rope_theta"] = theta * stretch ** ((d - 2) / d)
    return extended


def _dynamic(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters, C = rotary.config.rope_parameters, inv_freq_C.shape[0]
    if parameters["rope_type"] != "dynamic":
        return inv_freq_C
    place_C = torch.arange(C, device=inv_freq_C.device) / C
    stretch = inv_freq_C[-1] ** (-1 / place_C[-1]) / parameters["rope_theta"]
    return (parameters["rope_theta"] * stretch ** ((C - 1) / C)) ** -place_C


@contextmanager
def _apply() -> Iterator[None]:
    with swap(extend, _static), frequencies(_dynamic):
        yield


BUG = Bug(
    what="NTK-aware base without its exponent",
    where=(
        "seen in reviews of ports: base * s for base * s ** (d / (d - 2)), which arXiv 2309.00071 "
        "derives in section 3.1"
    ),
    stage="forward",
    apply=_apply,
    likely={"rope": ("ntk", "dynamic")},
)
