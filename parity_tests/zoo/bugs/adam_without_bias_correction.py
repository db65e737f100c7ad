"""Adam's moments are used with the bias of their zero start."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug, plain


class _AdamW(plain.AdamW):
    def correct(self, state, beta1, beta2):
        return state["mean"], state["square"]


BUG = Bug(
    what="Adam's bias correction missing",
    where=(
        'BERT\'s own optimiser (issue 153: "mostly an oversight"; arXiv 2006.05987 on what it cost), MLX before PR 1640'
    ),
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamW),
)
