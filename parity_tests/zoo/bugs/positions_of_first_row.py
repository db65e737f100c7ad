"""One table of cos and sin for the batch, made from its first row."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions


def _first_row(position_ids_BT: Tensor, _: Tensor) -> Tensor:
    return position_ids_BT[:1].expand_as(position_ids_BT)


BUG = Bug(
    what="the first row's positions for every row",
    where="seen in reviews of cos/sin caches shaped [1, T, D]",
    stage="forward",
    apply=lambda: positions(_first_row),
    likely={"variant": ("intra_reset", "anchor+interleave", "intra+interleave")},
)
