"""Bugs of the optimizer, of gradient clipping and of the learning rate's schedule."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from parity_tests.zoo import Bug, bug, plain
from parity_tests.zoo.patch import method, rates, settings, swap
from torchtrain.training.optimizer import Optimizer, _master, _move_gradients
from torchtrain.training.strategy import Replicated

adam_betas_default = Bug(lambda: settings(betas=(0.9, 0.999)))


@bug(patch.object, torch.optim, "AdamW")
class adam_epsilon_inside(plain.AdamW):
    def denominator(self, square, epsilon):
        return (square + epsilon).sqrt()


@bug(patch.object, torch.optim, "AdamW")
class adam_epsilon_scaled(plain.AdamW):
    def correct(self, state, beta1, beta2):
        mean, square = super().correct(state, beta1, beta2)
        self._root_of_correction = (1 - beta2 ** state["step"]) ** 0.5
        return mean, square

    def denominator(self, square, epsilon):
        return square.sqrt() + epsilon / self._root_of_correction


@bug(patch.object, torch.optim, "AdamW")
class adam_without_bias_correction(plain.AdamW):
    def correct(self, state, beta1, beta2):
        return state["mean"], state["square"]


@bug(patch.object, torch.optim, "AdamW")
class adam_keeps_the_largest(torch.optim.AdamW):
    def step(self, closure=None):
        before = {p: state["exp_avg_sq"].clone() for p, state in self.state.items()}
        super().step()
        for parameter, square in before.items():
            moment = self.state[parameter]["exp_avg_sq"]
            moment.copy_(torch.maximum(moment, square))


@bug(swap, _move_gradients)
def gradient_sums_in_half(masters, parameters):
    for master, parameter in zip(masters, parameters, strict=True):
        gradient = parameter.grad.float()
        total = gradient if master.grad is None else (master.grad + gradient).to(parameter.dtype).float()
        master.grad, parameter.grad = total, None


clip_missing = Bug(lambda: patch.object(nn.utils, "clip_grads_with_norm_", lambda *_, **__: None))
clip_norm_default = Bug(lambda: settings(clip_norm=1.0))


@bug(method, Optimizer, "__init__")
def clips_where_none_is(init, self, model, train):
    init(self, model, train)
    self.clip_norm = self.clip_norm or 1.0


@bug(patch.object, nn.utils, "clip_grads_with_norm_")
def clip_per_parameter(parameters, max_norm, total_norm, foreach=None):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_((max_norm / (parameter.grad.norm() + 1e-6)).clamp(max=1))


@bug(method, nn.utils, "clip_grads_with_norm_")
def clip_by_matrices(clip, parameters, max_norm, total_norm, foreach=None):
    parameters = list(parameters)
    norms = [parameter.grad.norm() for parameter in parameters if parameter.ndim >= 2 and parameter.grad is not None]
    clip(parameters, max_norm, torch.stack(norms).norm())


@bug(rates)
def decay_counts_warmup(rate, step, train):
    return rate(step, train if step < train.warmup_steps else train.model_copy(update={"warmup_steps": 0}))


gradients_not_cleared = Bug(
    lambda: patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None)
)


def _in_an_infinite_step(change):
    def changed(step, self, learning_rate, known=None):
        value = self.norm().item() if known is None else known
        if not math.isfinite(value):
            change(step, self, learning_rate)
            return value
        return step(self, learning_rate, known)

    return method(Optimizer, "step", changed)


@bug(_in_an_infinite_step)
def infinite_gradient_zeroed(step, self, learning_rate):
    for master in self.masters:
        master.grad.zero_()
    step(self, learning_rate)


infinite_gradient_kept = Bug(lambda: _in_an_infinite_step(lambda *_: None))


@bug(method, Optimizer, "step")
def learning_rate_set_once(step, self, learning_rate, *found):
    self.first_rate = getattr(self, "first_rate", learning_rate)
    return step(self, self.first_rate, *found)


no_master_weights = Bug(lambda: swap(_master, lambda parameter: parameter))


@bug(method, Optimizer, "step")
def norm_after_clipping(step, self, learning_rate, *found):
    norm = step(self, learning_rate, *found)
    return norm if self.clip_norm is None else min(norm, self.clip_norm)


@bug(rates)
def schedule_counts_micro_batches(rate, step, train):
    return rate(min(step * train.sequences_per_step // train.micro_batch, train.steps - 1), train)


@bug(rates)
def schedule_one_step_ahead(rate, step, train):
    return rate(min(step + 1, train.steps - 1), train)


@bug(rates)
def schedule_without_floor(rate, step, train):
    return rate(step, train.model_copy(update={"min_learning_rate_share": 0.0}))


@bug(rates)
def warmup_from_zero(rate, step, train):
    return rate(step, train) * step / (step + 1) if step < train.warmup_steps else rate(step, train)


@bug(rates)
def warmup_left_out(rate, step, train):
    return rate(max(step, train.warmup_steps), train)


@Bug
@contextmanager
def weight_decay_at_the_peak() -> Iterator[None]:
    peak = 0.0

    def note(init, self, model, train, *args):
        nonlocal peak
        peak = train.learning_rate
        init(self, model, train, *args)

    class AdamW(plain.AdamW):
        def update(self, parameter, gradient, group):
            decay = group["weight_decay"] * peak / group["lr"]
            super().update(parameter, gradient, group | {"weight_decay": decay})

    with method(Replicated, "__init__", note), patch.object(torch.optim, "AdamW", AdamW):
        yield


@bug(method, torch.optim.AdamW, "__init__")
def weight_decay_groups_swapped(init, self, params, *args, **kwargs):
    groups = list(params)
    decays = [group["weight_decay"] for group in reversed(groups)]
    swapped = [group | {"weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
    init(self, swapped, *args, **kwargs)


weight_decay_in_gradient = Bug(lambda: patch.object(torch.optim, "AdamW", torch.optim.Adam))


@bug(method, torch.optim.AdamW, "__init__")
def weight_decay_on_norms(init, self, params, *args, **kwargs):
    groups = list(params)
    decay = max(group["weight_decay"] for group in groups)
    init(self, [group | {"weight_decay": decay} for group in groups], *args, **kwargs)
