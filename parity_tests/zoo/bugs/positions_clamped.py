"""Positions beyond the cached cos and sin read the last row of the table: an indexed gather that clamps in silence."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import positions

_CACHED = 2048

BUG = Bug(
    what="positions clamped to the cached table",
    where=(
        "JAX gathers clamp out-of-range indices by default, so a cos/sin table that is too short "
        "gives no error (seen in reviews)"
    ),
    stage="forward",
    apply=lambda: positions(lambda position_ids_BT, _: position_ids_BT.clamp(max=_CACHED - 1)),
)
