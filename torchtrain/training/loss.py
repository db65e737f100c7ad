"""Cross entropy over a large vocabulary: the logits of a whole row never exist at one time, and none is computed twice.

A token's loss is the log-sum-exp of its logits minus its label's logit. The gradient of the logits is their softmax,
minus one at the label. Both are computed from one sum of exponentials. torch's `log_softmax` on a CPU sums the
exponentials one after another in float32: with 128,256 words its losses are too small by up to 1e-5. `Tensor.sum` sums
in a tree and has no such bias. CUDA's `log_softmax` and Liger's kernel have none either.

Legend: n tokens that have a label · M model width · V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from torchtrain.modeling.head import AS_THEY_ARE, LogitRule
from torchtrain.products import LINEAR, LinearInFloat32, multiply, round_for_products
from torchtrain.training.labels import Labels

_ROWS = 8192  # rows of the head's gradient that are computed at a time on a CPU
_ON_CPU, _LOGITS = 1024, 2**29  # the default chunk on a CPU, and the bytes of float32 logits that one holds on a GPU
_FEW, _WORDS = 512, 128  # for fewer tokens than _FEW, the hidden states' gradient is summed over _WORDS words at a time


def default_chunk(head: nn.Module, device: torch.device) -> int:
    """Return the tokens whose logits exist at one time where `train.loss_chunk` leaves it open.

    A GPU launches the same kernels for each chunk, so its chunks are larger: the most thousands of tokens whose float32
    logits take half a GiB.
    """
    words = getattr(head, "out_features", 2**17)
    return _ON_CPU if device.type == "cpu" else max(1, _LOGITS // (4 * 1024 * words)) * 1024


def chunked_cross_entropy(
    head: nn.Module,
    hidden: Tensor,
    labels: Labels,
    chunk: int | None,
    *,
    scale: float = 1.0,
    rule: LogitRule = AS_THEY_ARE,
) -> tuple[Tensor, Tensor]:
    """Sum the cross entropy of the labels, `chunk` tokens at a time.

    Tokens without a label do not reach the head. A chunk's losses and gradients are computed together and its logits
    then dropped, so at most [chunk, V] logits exist at a time. Gradients of the head's weights are summed over chunks
    in float32 (or the weights' wider dtype) and rounded once. On a CPU each chunk's product is rounded to the model's
    dtype before; a GPU's kernel adds it up in float32.

    head: maps [n, M] to logits [n, V]. Its hooks are not called: they would take the gradient for the whole step's.
    hidden: hidden states [.., M].
    labels: of the flattened [..], on hidden's device.
    chunk: tokens whose logits exist at one time; None: `default_chunk`.
    scale: the factor by which the caller multiplies the sum before backward. With another factor the gradients are
        right too, and rounded once more.
    rule: makes logits of the head's outputs, here in float32 or wider.
    Returns the sum of each loss times its weight, a scalar with a gradient, in float32 (or hidden's wider dtype); and
        each token's loss [..] without its weight, detached, 0 without a label. Without any label the sum is 0, with a
        gradient of zeros.
    """
    if chunk is None:
        chunk = default_chunk(head, hidden.device)
    hidden_nM = hidden.flatten(0, -2).index_select(0, labels.index_n)
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    if torch.is_grad_enabled() and (hidden_nM.requires_grad or weights):
        total, losses_n = _SummedLoss.apply(head, hidden_nM, labels, chunk, scale, rule, *weights)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        parts = zip(hidden_nM.split(chunk), labels.labels_n.split(chunk), strict=True)
        losses_n = torch.cat(
            [_losses(_logits(head, part_nM)[0], labels_n, None, rule)[0] for part_nM, labels_n in parts]
        )
        total = _sum(losses_n, labels)
    each = losses_n.new_zeros(hidden.shape[:-1])
    each.view(-1).index_copy_(0, labels.index_n, losses_n.detach())
    return total, each


def _sum(losses_n: Tensor, labels: Labels) -> Tensor:
    return (losses_n if labels.weights_n is None else losses_n * labels.weights_n).sum()


def _losses(
    logits_nV: Tensor, labels_n: Tensor, scale: float | Tensor | None, rule: LogitRule
) -> tuple[Tensor, Tensor]:
    """Return the losses [n] and `scale` times the gradient of the logits, in place. scale: number, [n, 1] or None."""
    labels_n1 = labels_n[:, None]
    slope_nV, factor = None, rule.factor / rule.divisor
    if factor != 1:
        logits_nV = logits_nV.mul_(factor)
    if rule.cap is not None:
        share_nV = logits_nV.div_(rule.cap).tanh_()
        slope_nV = None if scale is None else 1 - share_nV.square()
        logits_nV = share_nV.mul_(rule.cap)
    shifted_nV = logits_nV.sub_(logits_nV.amax(-1, keepdim=True))
    own_n1 = shifted_nV.gather(-1, labels_n1)
    exp_nV = shifted_nV.exp_()
    sum_n1 = exp_nV.sum(-1, keepdim=True)
    losses_n = (sum_n1.log() - own_n1)[:, 0]
    if scale is None:
        return losses_n, exp_nV
    d_logits_nV = exp_nV.mul_(scale * factor / sum_n1)
    d_logits_nV.scatter_(-1, labels_n1, d_logits_nV.gather(-1, labels_n1) - scale * factor)
    if slope_nV is not None:
        d_logits_nV.mul_(slope_nV)
    return losses_n, d_logits_nV


def _logits(head: nn.Module, hidden_nM: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a head's output in float32 or wider, in memory that may be overwritten, and what autograd made of it."""
    if type(head) is LinearInFloat32:
        return head.widened(hidden_nM), None
    made_nV = head.forward(hidden_nM)
    logits_nV = made_nV.detach().to(_at_least_float32(made_nV))
    # Another head may return its input or keep its output.
    shared = logits_nV.dtype == made_nV.dtype and type(head) not in LINEAR
    return logits_nV.clone() if shared else logits_nV, made_nV if made_nV.requires_grad else None


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _SummedLoss(torch.autograd.Function):
    """The sum of all losses. Its gradient, known up to a factor, is computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        head: nn.Module,
        hidden_nM: Tensor,
        labels: Labels,
        chunk: int,
        scale: float,
        rule: LogitRule,
        *weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        d_hidden_nM = torch.empty_like(hidden_nM) if ctx.needs_input_grad[1] else None
        sums = [torch.zeros_like(weight, dtype=_at_least_float32(weight)) for weight in weights]
        losses = []
        for first in range(0, max(len(hidden_nM), 1), chunk):
            part = slice(first, first + chunk)
            of_hidden = None if d_hidden_nM is None else d_hidden_nM[part]
            scales = (
                scale
                if labels.weights_n is None
                else scale * labels.weights_n[part, None].to(_at_least_float32(hidden_nM))
            )
            given = head, hidden_nM[part], labels.labels_n[part], scales, rule, of_hidden
            losses.append(_add_gradients(*given, weights, sums))
        losses_n = torch.cat(losses)
        # Rounded one after another, so that a step never holds all of them twice.
        rounded = [sums.pop(0).to(weight.dtype) for weight in weights]
        ctx.save_for_backward(d_hidden_nM, *rounded)
        ctx.scale = scale
        ctx.mark_non_differentiable(losses_n)
        return _sum(losses_n, labels), losses_n

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden_nM, *d_weights = (None if d is None else d * (d_total / ctx.scale) for d in ctx.saved_tensors)
        return None, d_hidden_nM, None, None, None, None, *d_weights


def _add_gradients(
    head: nn.Module,
    hidden_nM: Tensor,
    labels_n: Tensor,
    scale: float | Tensor,
    rule: LogitRule,
    d_hidden_nM: Tensor | None,
    weights: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> Tensor:
    """Return a chunk's losses; write its hidden states' gradient, and add gradients of the head's weights to sums."""
    linear = type(head) in LINEAR  # its gradients are computed here, without autograd
    with torch.set_grad_enabled(not linear):
        hidden_nM = hidden_nM.detach().requires_grad_(d_hidden_nM is not None)
        logits_nV, made_nV = _logits(head, hidden_nM)
    losses_n, d_logits_nV = _losses(logits_nV, labels_n, scale, rule)
    del logits_nV
    if not linear:
        assert made_nV is not None
        asked = [*weights] if d_hidden_nM is None else [*weights, hidden_nM]
        gradients = torch.autograd.grad(made_nV, asked, d_logits_nV.to(made_nV.dtype))
        if d_hidden_nM is not None:
            d_hidden_nM.copy_(gradients[-1])
        for total, added in zip(sums, gradients, strict=False):
            total += added
        return losses_n
    assert isinstance(head, nn.Linear)
    d_logits_nV = round_for_products(d_logits_nV, head.weight.dtype)
    if d_hidden_nM is not None:
        _multiply(d_logits_nV, head.weight, d_hidden_nM)
    for weight, total in zip(weights, sums, strict=True):
        if weight.dim() == 1:  # the bias
            total += d_logits_nV.sum(0, dtype=total.dtype)
        elif total.device.type == "cpu":  # in parts: the weights' whole gradient would exist beside its sum
            for rows, d_nv in zip(total.split(_ROWS), d_logits_nV.split(_ROWS, 1), strict=True):
                rows += multiply(d_nv.T, hidden_nM)
        elif total.dtype == d_logits_nV.dtype:
            total.addmm_(d_logits_nV.T, hidden_nM)
        else:
            torch.addmm(total, d_logits_nV.T, hidden_nM, out_dtype=total.dtype, out=total)
    return losses_n


def _multiply(d_logits_nV: Tensor, weight_VM: Tensor, d_hidden_nM: Tensor) -> None:
    """Write the gradient of the hidden states, a product over the vocabulary. For fewer than 64 rows MKL sums it word
    by word in float32, with 100 times the error of sums in parts; half precision would round each part.
    """
    narrow = torch.finfo(weight_VM.dtype).bits < 32
    if narrow or len(d_logits_nV) >= _FEW or d_logits_nV.device.type != "cpu":
        multiply(d_logits_nV, weight_VM, out=d_hidden_nM)
        return
    d_hidden_nM.zero_()
    for d_logits_nv, weight_vM in zip(d_logits_nV.split(_WORDS, 1), weight_VM.split(_WORDS), strict=True):
        d_hidden_nM += d_logits_nv @ weight_vM
