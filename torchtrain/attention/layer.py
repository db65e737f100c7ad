"""What an attention layer adds to the mask rule: its scale, and in some models a soft cap, sinks and a window.

Legend: H query heads · D head_dim.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class LayerOptions:
    """The options of a layer, for every engine. An engine refuses the options that it does not compute."""

    scale: float
    """Factor on the logits."""
    sinks_H: Tensor | None = None
    """Attention sinks (gpt-oss): for each query head one more logit of the softmax, with no value."""
    softcap: float | None = None
    """Each scaled logit x becomes softcap * tanh(x / softcap) (Gemma 2)."""
    window: int | None = None
    """How many tokens a query sees; see `torchtrain.attention.rule`."""
    keep_anchor: bool = False
    """Whether the anchor stays visible beyond the window; False if there is no window."""


def sink_gradient(grad: Tensor, out: Tensor, total: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the gradient [H] of sinks. grad, out: [.., H, D]; total: the log-sum-exp that counts them [.., H]."""
    probability = (sinks_H.to(total.dtype) - total).exp()
    gradient = -probability * (grad.to(total.dtype) * out.to(total.dtype)).sum(-1)
    return gradient.flatten(0, -2).sum(0).to(sinks_H.dtype)
