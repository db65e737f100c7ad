"""Gradients are clipped to 1, whatever the config says."""

from parity_tests.zoo import Bug
from parity_tests.zoo.patch import settings

BUG = Bug(
    what="limit of the clipping not that of the config",
    where="seen in reviews: an optimizer made of a section's defaults, before the overrides are read",
    stage="step",
    apply=lambda: settings(clip_norm=1.0),
)
