"""Gradients live on into the next step."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug

BUG = Bug(
    what="zero_grad missing",
    where=(
        "torchforge PR 71, tt-blacksmith PR 711, wekws PR 73, alpaca_farm PR 58; torch issue 47175 asks for a warning"
    ),
    stage="trajectory",
    apply=lambda: patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None),
)
