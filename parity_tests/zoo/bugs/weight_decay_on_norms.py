"""Every parameter decays, norms and biases included."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug

_init = torch.optim.AdamW.__init__


def _decay_all(self, params, *args, **kwargs):
    groups = list(params)
    decay = max(group["weight_decay"] for group in groups)
    _init(self, [group | {"weight_decay": decay} for group in groups], *args, **kwargs)


BUG = Bug(
    what="weight decay on norms",
    where=(
        "transformers PR 35927 (RMSNorm not recognised), Fast-LLM issue 542 (lost in a refactor), "
        "transformers issue 4360"
    ),
    stage="step",
    apply=lambda: patch.object(torch.optim.AdamW, "__init__", _decay_all),
)
