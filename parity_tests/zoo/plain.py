"""Correct attention and AdamW in plain PyTorch. A bug inside a fused kernel is written as a change of these.

`test_zoo.py` checks that both pass the gate without a bug.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · G query heads per key/value head · D head_dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchtrain.attention.layer import LayerOptions
from torchtrain.attention.plan import AttentionPlan
from torchtrain.attention.rule import visible_BTT


def softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Probabilities over the last axis where `mask`; 0 in rows that see nothing."""
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1) * mask


def attend(
    q_BTHD: Tensor,
    k_BTKD: Tensor,
    v_BTKD: Tensor,
    plan: AttentionPlan,
    layer: LayerOptions,
    probabilities: Callable[[Tensor, Tensor], Tensor] = softmax,
) -> tuple[Tensor, None]:
    """An engine: dense attention in float32 (float64 for float64). It rounds its output once, to the dtype of q.

    `probabilities` takes logits [B, K, G, T, T] and a mask that broadcasts to them. It returns what multiplies the
    values.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BTKD.shape[2]
    wide = torch.promote_types(q_BTHD.dtype, torch.float32)
    q_BKGTD = q_BTHD.to(wide).view(B, T, K, H // K, D).permute(0, 2, 3, 1, 4)
    k_BK1TD, v_BK1TD = (x.to(wide).permute(0, 2, 1, 3)[:, :, None] for x in (k_BTKD, v_BTKD))
    mask = visible_BTT(plan.document_ids_BT, layer.window, layer.keep_anchor)[:, None, None]
    logits = q_BKGTD @ k_BK1TD.mT * layer.scale
    if layer.softcap is not None:
        logits = (logits / layer.softcap).tanh() * layer.softcap
    out_BKGTD = probabilities(logits, mask) @ v_BK1TD
    if layer.sinks_H is not None:
        lse_BKGT = logits.masked_fill(~mask, torch.finfo(wide).min).logsumexp(-1)
        out_BKGTD = out_BKGTD * (lse_BKGT - layer.sinks_H.to(wide).view(K, H // K, 1)).sigmoid()[..., None]
    return out_BKGTD.permute(0, 3, 1, 2, 4).reshape(B, T, H, D).to(q_BTHD.dtype), None


class AdamW(torch.optim.Optimizer):
    """torch's AdamW (arXiv 1711.05101), one parameter at a time, in parts that a bug can override."""

    def __init__(self, params: Any, lr: Any, betas: Any, eps: float, weight_decay: float = 0.01, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Decay, then step."""
        state = self.state[parameter]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter), "square": torch.zeros_like(parameter)}
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["mean"].lerp_(gradient, 1 - beta1)
        state["square"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        mean, square = self.correct(state, beta1, beta2)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(group["lr"] * mean / self.denominator(square, group["eps"]))

    def correct(self, state: dict[str, Any], beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
        """First and second moment without the bias of their zero start."""
        return state["mean"] / (1 - beta1 ** state["step"]), state["square"] / (1 - beta2 ** state["step"])

    def denominator(self, square: Tensor, epsilon: float) -> Tensor:
        """Root of the second moment, kept from zero."""
        return square.sqrt() + epsilon
