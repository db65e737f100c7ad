"""AdamW in float32 for every dtype of the model.

A bfloat16 weight has 8 significant bits: an update smaller than 1/256 of it is lost. So a half-precision model gets
float32 masters, into whose gradients each backward pass moves its own; within a micro-batch autograd sums in the
model's dtype. A float32 parameter is its own master. A small model's step is bound by the kernels that it launches on a
GPU, so gradients move `WAITING` bytes at a time, and masters are copied into weights together.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchtrain.config import TrainConfig
from torchtrain.distributed.gradient_sums import GradientSums
from torchtrain.modeling.weights import whole_shape

# Bytes of gradients in the model's dtype that wait to be moved, at most, beside one more. A launch on a GPU takes some
# 36 tensors, or 20 million elements of them: 40 MB in bfloat16.
WAITING = 2**26


class Optimizer:
    """AdamW (arXiv 1711.05101) with clipping by the global norm.

    Weight decay applies to parameters of two or more dimensions (with embeddings and head), not to norms and biases.

    model: to train; after a backward pass the gradients are in `masters`.
    train: with weight decay, betas, epsilon and clip_norm. The learning rate is an argument of each step.
    """

    def __init__(self, model: nn.Module, train: TrainConfig) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.masters = [_master(p) for p in self.parameters]
        self.clip_norm = train.clip_norm
        self._norm: Tensor | None = None
        self._sums: GradientSums | None = None
        self._waiting: list[tuple[nn.Parameter, Tensor]] = []
        self._master_of = {id(p): m for p, m in zip(self.parameters, self.masters, strict=True)}
        for parameter in self.parameters:
            parameter.register_post_accumulate_grad_hook(self._take)
        self.adamw = adamw(self.masters, train)

    def norm(self) -> Tensor:
        """Return the global norm of the gradient on its device, without waiting for it.

        Each row of a weight is summed by itself, then all rows together. torch's float32 norm of a whole weight is too
        small on a CPU: by 1.6 per cent for an embedding of 32,000 x 4,096. CUDA sums in a tree of blocks of 65,536
        numbers, in each of which a thread adds 128: so few roundings need no rows.
        """
        gradients = [m.grad for m in self.masters if m.grad is not None]
        if self.masters[0].device.type == "cpu":
            parts = [torch.linalg.vector_norm(gradient, dim=-1) for gradient in gradients]
        else:
            parts = list(torch._foreach_norm(gradients))
        self._norm = torch.cat([part.flatten() for part in parts]).square().sum().sqrt()
        return self._norm

    def step(self, learning_rate: float, known: float | None = None) -> float:
        """Clip, update the weights and drop the gradients. Return the gradient's global norm before clipping.

        If the norm is not finite, no weight is updated.

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
        if pairs := self._pairs():
            with torch.no_grad():
                torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])
        return value

    def drop(self) -> None:
        """Drop the gradients of this step."""
        self._norm, self._waiting = None, []
        self.adamw.zero_grad(set_to_none=True)

    def sum_over_ranks(self) -> GradientSums:
        """Return sums over ranks of the masters' gradients, which are noted as soon as they are complete."""
        self._sums = GradientSums(self.masters)
        return self._sums

    def _take(self, parameter: Tensor) -> None:
        """Take a parameter's gradient in the backward pass that has completed it."""
        master = self._master_of[id(parameter)]
        if master is parameter:
            if self._sums is not None:
                self._sums.note(master)
            return
        if not self._waiting:  # autograd calls it at the end of this backward pass
            torch.autograd.Variable._execution_engine.queue_callback(self._move)  # type: ignore[attr-defined]
        self._waiting.append((parameter, master))  # type: ignore[arg-type]
        if sum(p.nbytes for p, _ in self._waiting) >= WAITING:
            self._move()

    def _move(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting:
            _move_gradients([master for _, master in waiting], [parameter for parameter, _ in waiting])
        if self._sums is not None:
            for _, master in waiting:
                self._sums.note(master)

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
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


@torch.no_grad()
def _move_gradients(masters: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Add the gradients of parameters to those of their masters, in the masters' dtype."""
    gradients = [torch.empty_like(master) for master in masters]
    torch._foreach_copy_(gradients, [_gradient(parameter) for parameter in parameters])
    sums = [(master.grad, gradient) for master, gradient in zip(masters, gradients, strict=True)]
    if old := [(total, gradient) for total, gradient in sums if total is not None]:
        torch._foreach_add_([total for total, _ in old], [gradient for _, gradient in old])
    for master, parameter, (total, gradient) in zip(masters, parameters, sums, strict=True):
        master.grad = gradient if total is None else total
        parameter.grad = None


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
