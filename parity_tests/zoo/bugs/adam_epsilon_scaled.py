"""Epsilon is added before the bias correction: the first step's is 31 times larger (beta2 0.999)."""

from unittest.mock import patch

import torch

from parity_tests.zoo import Bug, plain


class _AdamW(plain.AdamW):
    def correct(self, state, beta1, beta2):
        mean, square = super().correct(state, beta1, beta2)
        self._root_of_correction = (1 - beta2 ** state["step"]) ** 0.5
        return mean, square

    def denominator(self, square, epsilon):
        return square.sqrt() + epsilon / self._root_of_correction


BUG = Bug(
    what="Adam's epsilon before the bias correction",
    where="TensorFlow's Adam (issue 9047: its epsilon is the paper's epsilon hat), optax issue 571, torch issue 104857",
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamW),
)
