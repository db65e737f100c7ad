"""Key/value heads are tiled (0 1 0 1) where each should serve a run of neighbouring query heads (0 0 1 1)."""

from torch import Tensor

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import attention


def _make(attend):
    def tile(q: Tensor, k: Tensor, v: Tensor, plan, **options):
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat(1, 1, groups, 1) for x in (k, v))
        return attend(q, k, v, plan, **options)

    return tile


BUG = Bug(
    what="key/value heads repeated in the wrong order",
    where="the ONNX Attention operator's own definition used Tile (PR 7274); axlearn PR 842",
    stage="forward",
    apply=lambda: attention(_make),
)
