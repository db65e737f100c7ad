"""Position interpolation on the positions and once more on the frequencies."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import frequencies


def _again(rotary, inv_freq_C: Tensor) -> Tensor:
    parameters = rotary.config.rope_parameters
    return inv_freq_C / parameters["factor"] if parameters["rope_type"] == "linear" else inv_freq_C


BUG = Bug(
    what="linear scaling applied twice",
    where=(
        "seen in reviews: interpolation moved from the positions to inv_freq (as transformers did) and left in both; "
        "sglang PR 33558 squares YaRN's factor alike"
    ),
    stage="forward",
    apply=lambda: frequencies(_again),
    likely={"rope": "linear"},
)
