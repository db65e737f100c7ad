"""Each boundary shifts the positions after it by one, as a separator that was counted and then removed."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions


def _shift(position_ids_BT: Tensor, document_ids_BT: Tensor) -> Tensor:
    return position_ids_BT + (document_ids_BT - 1).clamp(min=0)


BUG = Bug(
    what="positions off by one after each boundary",
    where="nanoVLM issue 201: positions counted through a pad token between packed samples",
    stage="forward",
    apply=lambda: positions(_shift),
    likely={"variant": ("anchor", "intra")},
)
