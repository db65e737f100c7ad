"""No clipping, whatever the config says."""

from unittest.mock import patch

from torch import nn

from parity_tests.zoo import Bug

BUG = Bug(
    what="gradient clipping left out",
    where=(
        "seen in reviews: clipping configured in one place (DeepSpeed's gradient_clipping, the "
        "trainer's) and expected of the other"
    ),
    stage="step",
    apply=lambda: patch.object(nn.utils, "clip_grads_with_norm_", lambda *_, **__: None),
)
