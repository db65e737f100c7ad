"""Each layer gets the weights of the next, the last those of the first."""

import re

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import loaded_weights


def _roll(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    layers = 1 + max((int(i) for i in re.findall(r"layers\.(\d+)\.", " ".join(state_dict))), default=0)

    def name_next(name: str) -> str:
        return re.sub(r"layers\.(\d+)\.", lambda match: f"layers.{(int(match[1]) + 1) % layers}.", name)

    return {name: state_dict[name_next(name)] for name in state_dict}


BUG = Bug(
    what="layers' weights off by one",
    where="checkpoints numbered from 1 and pipeline stages with an offset, seen in reviews of converters",
    stage="forward",
    apply=lambda: loaded_weights(_roll),
)
