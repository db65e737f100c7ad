"""Bugs of the optimizer, of gradient clipping and of the learning rate's schedule."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import nn

from parity_tests.zoo import Bug, plain
from parity_tests.zoo.patch import rates, settings, swap
from torchtrain.training.optimizer import Optimizer, _master, _move_gradient
from torchtrain.training.strategy import Replicated

adam_betas_default = Bug(
    what="AdamW's betas not those of the config",
    where="hard-coded betas: OpenNMT-py PR 386, MaxText PR 17 (0.999 where 0.95 trains without spikes)",
    stage="trajectory",
    apply=lambda: settings(betas=(0.9, 0.999)),
)


class _AdamEpsilonInside(plain.AdamW):
    def denominator(self, square, epsilon):
        return (square + epsilon).sqrt()


# sqrt(v + eps) for sqrt(v) + eps.
adam_epsilon_inside = Bug(
    what="Adam's epsilon inside the root",
    where=(
        "implementations differ: tf-keras issue 315 (other optimisers put it there), optax has "
        "eps_root for it (issue 571), TensorFlow PR 22876"
    ),
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamEpsilonInside),
)


class _AdamEpsilonScaled(plain.AdamW):
    def correct(self, state, beta1, beta2):
        mean, square = super().correct(state, beta1, beta2)
        self._root_of_correction = (1 - beta2 ** state["step"]) ** 0.5
        return mean, square

    def denominator(self, square, epsilon):
        return square.sqrt() + epsilon / self._root_of_correction


# Epsilon is added before the bias correction: the first step's is 31 times larger (beta2 0.999).
adam_epsilon_scaled = Bug(
    what="Adam's epsilon before the bias correction",
    where="TensorFlow's Adam (issue 9047: its epsilon is the paper's epsilon hat), optax issue 571, torch issue 104857",
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamEpsilonScaled),
)


class _AdamWithoutBiasCorrection(plain.AdamW):
    def correct(self, state, beta1, beta2):
        return state["mean"], state["square"]


adam_without_bias_correction = Bug(
    what="Adam's bias correction missing",
    where=(
        'BERT\'s own optimiser (issue 153: "mostly an oversight"; arXiv 2006.05987 on what it cost), MLX before PR 1640'
    ),
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamWithoutBiasCorrection),
)


class _AdamKeepsTheLargest(torch.optim.AdamW):
    def step(self, closure=None):
        before = {p: state["exp_avg_sq"].clone() for p, state in self.state.items()}
        super().step()
        for parameter, square in before.items():
            moment = self.state[parameter]["exp_avg_sq"]
            moment.copy_(torch.maximum(moment, square))


# The denominator never falls, and so a parameter's own rate never rises again.
adam_keeps_the_largest = Bug(
    what="AMSGrad where AdamW is meant",
    where="torch's AdamW and Keras' Adam have an option `amsgrad`, which is off by default",
    stage="run",
    apply=lambda: patch.object(torch.optim, "AdamW", _AdamKeepsTheLargest),
)


def _add_in_half(master, parameter):
    gradient = parameter.grad.float()
    total = gradient if master.grad is None else (master.grad + gradient).to(parameter.dtype).float()
    master.grad, parameter.grad = total, None


# A sum of many micro-batches stops growing where each is below half a unit of its last place.
gradient_sums_in_half = Bug(
    what="gradients of micro-batches summed in the model's dtype",
    where="DeepSpeed's grad_accum_dtype and Megatron's --accumulate-allreduce-grads-in-fp32 exist to avoid it",
    stage="gradients",
    apply=lambda: swap(_move_gradient, _add_in_half),
    likely={"dtype": "bfloat16", "repeats": "256"},
)


clip_missing = Bug(
    what="gradient clipping left out",
    where=(
        "seen in reviews: clipping configured in one place (DeepSpeed's gradient_clipping, the "
        "trainer's) and expected of the other"
    ),
    stage="step",
    apply=lambda: patch.object(nn.utils, "clip_grads_with_norm_", lambda *_, **__: None),
)


clip_norm_default = Bug(
    what="limit of the clipping not that of the config",
    where="seen in reviews: an optimizer made of a section's defaults, before the overrides are read",
    stage="step",
    apply=lambda: settings(clip_norm=1.0),
)


_make_optimizer = Optimizer.__init__


def _with_a_limit(self, model, train):
    _make_optimizer(self, model, train)
    self.clip_norm = self.clip_norm or 1.0


clips_where_none_is = Bug(
    what="gradients clipped where the config has no limit",
    where="clip_norm or 1.0, seen in reviews of trainers",
    stage="run",
    apply=lambda: patch.object(Optimizer, "__init__", _with_a_limit),
)


def _clip_each(parameters, max_norm, total_norm, foreach=None):
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_((max_norm / (parameter.grad.norm() + 1e-6)).clamp(max=1))


clip_per_parameter = Bug(
    what="gradients clipped one by one",
    where="transformers issue 581 (BertAdam), PR 614 (per group); cosmos-rl PR 120 (per pipeline part)",
    stage="step",
    apply=lambda: patch.object(nn.utils, "clip_grads_with_norm_", _clip_each),
)


_torch_clip = nn.utils.clip_grads_with_norm_


def _clip_by_matrices(parameters, max_norm, total_norm, foreach=None):
    parameters = list(parameters)
    norms = [parameter.grad.norm() for parameter in parameters if parameter.ndim >= 2 and parameter.grad is not None]
    _torch_clip(parameters, max_norm, torch.stack(norms).norm())


clip_by_matrices = Bug(
    what="gradients clipped by the norm of the matrices alone",
    where="seen in reviews: the norm taken over the group of parameters that decay",
    stage="step",
    apply=lambda: patch.object(nn.utils, "clip_grads_with_norm_", _clip_by_matrices),
    likely={"model": "qwen3", "dtype": "float32"},
)


def _from_the_start(rate, step, train):
    return rate(step, train if step < train.warmup_steps else train.model_copy(update={"warmup_steps": 0}))


decay_counts_warmup = Bug(
    what="decay that counts the warmup's steps",
    where="progress taken as step / steps, seen in reviews; timm issue 1242 (a sharp drop where the warmup ends)",
    stage="trajectory",
    apply=lambda: rates(_from_the_start),
    likely={"schedule": ("cosine", "linear")},
)


gradients_not_cleared = Bug(
    what="zero_grad missing",
    where=(
        "torchforge PR 71, tt-blacksmith PR 711, wekws PR 73, alpaca_farm PR 58; torch issue 47175 asks for a warning"
    ),
    stage="trajectory",
    apply=lambda: patch.object(torch.optim.Optimizer, "zero_grad", lambda self, set_to_none=True: None),
)


_infinite_step = Optimizer.step


def _in_an_infinite_step(change):
    def step(self, learning_rate, known=None):
        value = self.norm().item() if known is None else known
        if not math.isfinite(value):
            change(self, learning_rate)
            return value
        return _infinite_step(self, learning_rate, known)

    return lambda: patch.object(Optimizer, "step", step)


def _on_zeros(self, learning_rate):
    for master in self.masters:
        master.grad.zero_()
    _infinite_step(self, learning_rate)


infinite_gradient_zeroed = Bug(
    what="a step with an infinite gradient updates on zeros",
    where="Lightning issue 4956 (zero_grad in place of leaving the step out), Ray PR 47452 (NaN put to zero)",
    stage="run",
    apply=_in_an_infinite_step(_on_zeros),
    likely={"infinite_step": "2"},
)


infinite_gradient_kept = Bug(
    what="an infinite gradient stays for the next step",
    where="an early return in front of zero_grad, seen in reviews",
    stage="run",
    apply=_in_an_infinite_step(lambda self, _: None),
    likely={"infinite_step": "2"},
)


_learning_rate_set_once_step = Optimizer.step


def _at_the_first_rate(self, learning_rate, *found):
    self.first_rate = getattr(self, "first_rate", learning_rate)
    return _learning_rate_set_once_step(self, self.first_rate, *found)


learning_rate_set_once = Bug(
    what="learning rate set once",
    where=(
        "schedulers bound to another optimizer than the one that steps, as wrapping or resuming "
        "makes it (seen in reviews)"
    ),
    stage="trajectory",
    apply=lambda: patch.object(Optimizer, "step", _at_the_first_rate),
    likely={"schedule": ("cosine", "linear")},
)


# A bfloat16 model is its own master: updates below 1/256 of a weight are lost.
no_master_weights = Bug(
    what="AdamW in bf16 without master weights",
    where="AReaL issue 1292 (loss three times higher), apex issue 1728 (FusedAdam), NeMo Automodel PR 3444",
    stage="step",
    apply=lambda: swap(_master, lambda parameter: parameter),
    likely={"dtype": "bfloat16"},
)


_norm_after_clipping_step = Optimizer.step


def _clip(self, learning_rate, *found):
    norm = _norm_after_clipping_step(self, learning_rate, *found)
    return norm if self.clip_norm is None else min(norm, self.clip_norm)


norm_after_clipping = Bug(
    what="gradient norm reported after clipping",
    where=(
        "a norm that never exceeds the limit says nothing: verl issue 2282 and miles PR 2132 on "
        "which of the two is meant"
    ),
    stage="trajectory",
    apply=lambda: patch.object(Optimizer, "step", _clip),
)


def _by_micro_batch(rate, step, train):
    return rate(min(step * train.sequences_per_step // train.micro_batch, train.steps - 1), train)


schedule_counts_micro_batches = Bug(
    what="schedule moved on by every micro-batch",
    where="accelerate issue 963; once a process: accelerate issue 2926, transformers PR 24088, diffusers issue 3954",
    stage="trajectory",
    apply=lambda: rates(_by_micro_batch),
    likely={"schedule": ("cosine", "linear")},
)


def _next(rate, step, train):
    return rate(min(step + 1, train.steps - 1), train)


schedule_one_step_ahead = Bug(
    what="schedule one step ahead",
    where=(
        "scheduler.step() before optimizer.step(), which torch warns of since 1.1: "
        "pytorch-gradual-warmup-lr PR 11, seen in reviews"
    ),
    stage="trajectory",
    apply=lambda: rates(_next),
    likely={"schedule": ("cosine", "linear")},
)


def _to_zero(rate, step, train):
    return rate(step, train.model_copy(update={"min_learning_rate_share": 0.0}))


schedule_without_floor = Bug(
    what="learning rate's floor ignored",
    where="GPT-NeoX PR 1008 (min_lr only cut the curve off), MLX before PR 859 (no floor at all)",
    stage="trajectory",
    apply=lambda: rates(_to_zero),
    likely={"schedule": ("cosine", "linear")},
)


def _from_zero(rate, step, train):
    return rate(step, train) * step / (step + 1) if step < train.warmup_steps else rate(step, train)


warmup_from_zero = Bug(
    what="warmup from a rate of zero",
    where="BERT's own schedule (issue 1293), torchtitan PR 1261 and DeepSpeed PR 5287 on the step that is lost",
    stage="step",
    apply=lambda: rates(_from_zero),
    likely={"warmup_steps": "5"},
)


def _at_the_peak(rate, step, train):
    return rate(max(step, train.warmup_steps), train)


warmup_left_out = Bug(
    what="warmup left out",
    where=(
        "seen in reviews: warmup configured in one place (DeepSpeed's scheduler, the trainer's) and "
        "expected of the other"
    ),
    stage="step",
    apply=lambda: rates(_at_the_peak),
    likely={"warmup_steps": "5"},
)


_weight_decay_at_the_peak_init = Replicated.__init__


@contextmanager
def _weight_decay_at_the_peak() -> Iterator[None]:
    peak = 0.0

    def init(self, model, train, *args):
        nonlocal peak
        peak = train.learning_rate
        _weight_decay_at_the_peak_init(self, model, train, *args)

    class AdamW(plain.AdamW):
        def update(self, parameter, gradient, group):
            decay = group["weight_decay"] * peak / group["lr"]
            super().update(parameter, gradient, group | {"weight_decay": decay})

    with patch.object(Replicated, "__init__", init), patch.object(torch.optim, "AdamW", AdamW):
        yield


weight_decay_at_the_peak = Bug(
    what="weight decay that ignores the schedule",
    where=(
        "decay decoupled from the rate altogether, where torch's AdamW multiplies the two; ports "
        "mix them (seen in reviews)"
    ),
    stage="step",
    apply=_weight_decay_at_the_peak,
    likely={"warmup_steps": "5"},
)


_weight_decay_groups_swapped_init = torch.optim.AdamW.__init__


def _swap(self, params, *args, **kwargs):
    groups = list(params)
    decays = [group["weight_decay"] for group in reversed(groups)]
    swapped = [group | {"weight_decay": decay} for group, decay in zip(groups, decays, strict=True)]
    _weight_decay_groups_swapped_init(self, swapped, *args, **kwargs)


weight_decay_groups_swapped = Bug(
    what="weight decay on norms alone",
    where="BalancingGroups issue 6: decay for what is named bias or LayerNorm.weight, and for nothing else",
    stage="step",
    apply=lambda: patch.object(torch.optim.AdamW, "__init__", _swap),
)


weight_decay_in_gradient = Bug(
    what="weight decay through Adam's moments (L2)",
    where="every framework's Adam(weight_decay=...) before arXiv 1711.05101 told the two apart",
    stage="step",
    apply=lambda: patch.object(torch.optim, "AdamW", torch.optim.Adam),
)


_weight_decay_on_norms_init = torch.optim.AdamW.__init__


def _decay_all(self, params, *args, **kwargs):
    groups = list(params)
    decay = max(group["weight_decay"] for group in groups)
    _weight_decay_on_norms_init(self, [group | {"weight_decay": decay} for group in groups], *args, **kwargs)


weight_decay_on_norms = Bug(
    what="weight decay on norms",
    where=(
        "transformers PR 35927 (RMSNorm not recognised), Fast-LLM issue 542 (lost in a refactor), "
        "transformers issue 4360"
    ),
    stage="step",
    apply=lambda: patch.object(torch.optim.AdamW, "__init__", _decay_all),
)
