"""cos and sin of angles that were rounded to bfloat16: at position 1000 an angle is off by up to 2 radians."""

import torch
from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import tables


def _make(_: object, position_ids_BT: Tensor, inv_freq_C: Tensor) -> tuple[Tensor, Tensor]:
    angle = (position_ids_BT[..., None].float() * inv_freq_C).bfloat16().float()
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


BUG = Bug(
    what="cos and sin of angles in bf16",
    where=(
        "transformers before 4.38.2 under autocast (PR 29285), modded-nanogpt issue 39; the subject of arXiv 2411.13476"
    ),
    stage="forward",
    apply=lambda: tables(_make),
)
