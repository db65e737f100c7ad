"""sqrt(v + eps) for sqrt(v) + eps."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug, plain


class _AdamW(plain.AdamW):
    def denominator(self, square, epsilon):
        return (square + epsilon).sqrt()


BUG = Bug(
    what="Adam's epsilon inside the root",
    where=(
        "implementations differ: tf-keras issue 315 (other optimisers put it there), optax has "
        "eps_root for it (issue 571), TensorFlow PR 22876"
    ),
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamW),
)
