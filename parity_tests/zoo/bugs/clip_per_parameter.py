"""Every parameter's gradient is clipped by its own norm."""

from unittest.mock import patch

from torch import nn

from parity_tests.zoo import Bug


def _clip_each(parameters, max_norm, total_norm, foreach=None):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_((max_norm / (parameter.grad.norm() + 1e-6)).clamp(max=1))


BUG = Bug(
    what="gradients clipped one by one",
    where="transformers issue 581 (BertAdam), PR 614 (per group); cosmos-rl PR 120 (per pipeline part)",
    stage="step",
    apply=lambda: patch.object(nn.utils, "clip_grads_with_norm_", _clip_each),
)
