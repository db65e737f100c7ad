"""Norms and biases decay, matrices do not."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug

_init = torch.optim.AdamW.__init__


def _swap(self, params, *args, **kwargs):
    groups = list(params)
    decays = [group["weight_decay"] for group in reversed(groups)]
    swapped = [group | {"weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
    _init(self, swapped, *args, **kwargs)


BUG = Bug(
    what="weight decay on norms alone",
    where="BalancingGroups issue 6: decay for what is named bias or LayerNorm.weight, and for nothing else",
    stage="step",
    apply=lambda: patch.object(torch.optim.AdamW, "__init__", _swap),
)
