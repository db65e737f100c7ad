"""AdamW in float32 for every dtype of the model.

A bfloat16 weight has 8 significant bits: an update smaller than 1/256 of it is lost. So a half-precision model gets
float32 master weights, and gradients are summed over micro-batches in float32: after each backward pass a hook moves a
parameter's gradient into its master's. A float32 parameter is its own master. Within a micro-batch autograd sums in the
model's dtype; the head's gradient is summed over chunks in float32 (`torchtrain.training.loss`).
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from torchtrain.config import TrainConfig
from torchtrain.distributed.gradient_sums import GradientSums
from torchtrain.modeling.parts import whole_shape


class Optimizer:
    """AdamW (arXiv 1711.05101) with clipping by the global norm.

    Weight decay applies to parameters of two or more dimensions (with embeddings and head), not to norms and biases.

    Args:
        model: to train; after a backward pass the gradients are in `masters`.
        train: with weight decay, betas, epsilon and clip_norm. The learning rate is an argument of each step.
    """

    def __init__(self, model: nn.Module, train: TrainConfig) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [_master(p) for p in self.parameters]
        self.clip_norm = train.clip_norm
        self._norm: Tensor | None = None
        for parameter, master in self._pairs():
            parameter.register_post_accumulate_grad_hook(partial(_move_gradient, master))
        self.adamw = adamw(self.masters, train)

    def norm(self) -> Tensor:
        """Return the global norm of the gradient on its device, without waiting for it.

        Each row of a weight is summed by itself, then all rows together. torch's float32 norm of a whole weight is too
        small on a CPU: by 1.6 per cent for an embedding of 32,000 x 4,096.
        """
        rows = [torch.linalg.vector_norm(m.grad, dim=-1).flatten() for m in self.masters if m.grad is not None]
        self._norm = torch.cat(rows).square().sum().sqrt()
        return self._norm

    def step(self, learning_rate: float, known: float | None = None) -> float:
        """Clip, update the weights and drop the gradients. Return the gradient's global norm before clipping.

        If the norm is not finite, no weight is updated.

        Args:
            learning_rate: of this step.
            known: the value of `norm` if the caller has read it; otherwise this waits for the device.
        """
        norm = self.norm() if known is None or self._norm is None else self._norm
        value = norm.item() if known is None else known
        if not math.isfinite(value):
            self.drop()
            return value
        if self.clip_norm is not None:
            nn.utils.clip_grads_with_norm_(self.masters, self.clip_norm, norm)
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self.drop()
        with torch.no_grad():
            for parameter, master in self._pairs():
                parameter.copy_(master)
        return value

    def drop(self) -> None:
        """Drop the gradients of this step."""
        self._norm = None
        self.adamw.zero_grad(set_to_none=True)

    def sum_over_ranks(self) -> GradientSums:
        """Return sums over ranks of the masters' gradients, which are noted as soon as they are complete."""
        sums = GradientSums(self.masters)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            # Hooks run in the order of registration: the gradient is in its master already.
            parameter.register_post_accumulate_grad_hook(lambda _, master=master: sums.note(master))
        return sums

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return the parameters that have a separate master."""
        return [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]


def adamw(parameters: Sequence[Tensor], train: TrainConfig) -> torch.optim.AdamW:
    """Return torch's AdamW with learning rate 0 and weight decay for parameters of two or more dimensions."""
    groups = [
        {"params": [p for p in parameters if len(whole_shape(p)) >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if len(whole_shape(p)) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=0.0, betas=train.betas, eps=train.epsilon, fused=True)


def _master(parameter: nn.Parameter) -> Tensor:
    if torch.promote_types(parameter.dtype, torch.float32) == parameter.dtype:
        return parameter
    return parameter.detach().float().requires_grad_()


def _move_gradient(master: Tensor, parameter: Tensor) -> None:
    assert parameter.grad is not None
    gradient = parameter.grad.float()
    master.grad = gradient if master.grad is None else master.grad.add_(gradient)
    parameter.grad = None
