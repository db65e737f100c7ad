"""Cross entropy over a large vocabulary without ever holding the logits of a whole row, or making them twice.

Legend: n tokens that have a label · M model width · V vocabulary.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtrain.training.labels import Labels


def chunked_cross_entropy(
    head: nn.Module, hidden: Tensor, labels: Labels, chunk: int, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of the labels, `chunk` tokens at a time.

    Tokens without a label never reach the head. A chunk's logits are dropped as soon as its losses are taken, and the
    gradients of these with them, so at most [chunk, V] logits exist at a time, and once. Gradients of the head's
    weights are summed over chunks in float32 (or a wider dtype of theirs), and rounded once.

    Args:
        head: maps [n, M] to logits [n, V]; called without its hooks, which would take the gradient for the step's.
        hidden: hidden states [.., M].
        labels: which tokens of the flattened [..] have one; on hidden's device. Nothing here waits for it.
        chunk: tokens whose logits exist at one time.
        scale: what the sum is multiplied by before backward is called. The gradient of another multiple is right, too,
            and that of hidden is rounded once more.

    Returns:
        The sum, a scalar to call backward on, in float32 (or in hidden's dtype if that is wider); and each token's loss
        [..], detached, 0 where there is no label. Of no labels at all the sum is 0, with a gradient of zeros.
    """
    hidden_nM = hidden.flatten(0, -2).index_select(0, labels.index_n)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    if torch.is_grad_enabled() and (hidden_nM.requires_grad or weights):
        total, losses_n = _SummedLoss.apply(head, hidden_nM, labels.labels_n, chunk, scale, *weights)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        parts = zip(hidden_nM.split(chunk), labels.labels_n.split(chunk), strict=True)
        losses_n = torch.cat([_losses(head, part_nM, labels_n) for part_nM, labels_n in parts])
        total = losses_n.sum()
    each = losses_n.new_zeros(hidden.shape[:-1])
    each.view(-1).index_copy_(0, labels.index_n, losses_n.detach())
    return total, each


def _losses(head: nn.Module, hidden_nM: Tensor, labels_n: Tensor) -> Tensor:
    logits_nV = head.forward(hidden_nM)
    return F.cross_entropy(logits_nV.to(_at_least_float32(logits_nV)), labels_n, reduction="none")


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _SummedLoss(torch.autograd.Function):
    """The sum of all losses, whose gradient is known up to a factor before any backward pass: it is taken at once."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        hidden_nM: Tensor,
        labels_n: Tensor,
        chunk: int,
        scale: float,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        d_hidden_nM = torch.empty_like(hidden_nM) if ctx.needs_input_grad[1] else None
        d_weights = [torch.zeros_like(weight, dtype=_at_least_float32(weight)) for weight in weights]
        losses = []
        for first in range(0, max(len(hidden_nM), 1), chunk):
            part = slice(first, first + chunk)
            part_nM = hidden_nM[part].detach().requires_grad_(d_hidden_nM is not None)
            with torch.enable_grad():
                losses_n = _losses(head, part_nM, labels_n[part])
            losses.append(losses_n.detach())
            asked = [part_nM, *weights] if d_hidden_nM is not None else weights
            found = list(torch.autograd.grad(losses_n, asked, torch.full_like(losses_n, scale)))
            del losses_n
            if d_hidden_nM is not None:
                d_hidden_nM[part] = found.pop(0)
            for d_weight, found_here in zip(d_weights, found, strict=True):
                d_weight += found_here
        losses_n = torch.cat(losses)
        ctx.save_for_backward(d_hidden_nM, *d_weights)
        ctx.scale, ctx.dtypes = scale, [weight.dtype for weight in weights]
        ctx.mark_non_differentiable(losses_n)
        return losses_n.sum(), losses_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_nM, *d_weights = ctx.saved_tensors
        more = d_total / ctx.scale
        made = (torch.empty_like(d, dtype=dtype) for d, dtype in zip(d_weights, ctx.dtypes, strict=True))
        weights = (torch.mul(d, more, out=out) for d, out in zip(d_weights, made, strict=True))
        return None, None if d_hidden_nM is None else d_hidden_nM * more, None, None, None, *weights
