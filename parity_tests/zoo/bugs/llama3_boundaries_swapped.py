"""low_freq_factor and high_freq_factor change places."""

import copy

from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _swap(rotary, inv_freq_C: Tensor) -> Tensor:
    if rotary.config.rope_parameters["rope_type"] != "llama3":
        return inv_freq_C
    config = copy.deepcopy(rotary.config)
    low, high = (config.rope_parameters[name] for name in ("low_freq_factor", "high_freq_factor"))
    config.rope_parameters |= {"low_freq_factor": high, "high_freq_factor": low}
    return ROPE_INIT_FUNCTIONS["llama3"](config, inv_freq_C.device)[0]


BUG = Bug(
    what="llama3 boundaries swapped",
    where=(
        "seen in reviews of ports: wavelength bounds are original length over each factor, so the "
        "high factor bounds the short waves"
    ),
    stage="forward",
    apply=lambda: frequencies(_swap),
    likely={"rope": "llama3"},
)
