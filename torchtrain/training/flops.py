"""FLOPs that a step needs, from the work that the mask leaves, and the share of a GPU's peak that this is (MFU).

Forward and backward of one batch, a multiplication and an addition counted as two:

    6 x P x tokens  +  6 x V x M x tokens with a label  +  6 x L x H x (D + E) x live pairs

P counts all matrices but embeddings and head, every expert too; a frozen weight takes 4 where a trained one takes 6. A
live pair is a (query, key) pair that the mask leaves, in the mean over layers. Padding, norms, softmax, a state's
recurrence and what is computed a second time are not counted. Upstream: arXiv 2204.02311, appendix B (all T x T pairs).

Legend: M model width · V vocabulary · L layers with attention · H query heads · D, E head_dim of keys and of values.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from torchtrain.attention.masks import layer_windows
from torchtrain.modeling.head import head_of
from torchtrain.modeling.weights import count_weights, whole_shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Dense bfloat16 peak in FLOP/s with float32 accumulation, from NVIDIA's data sheets; the first name that fits counts.
_PEAKS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}


@dataclass(frozen=True)
class FlopCounter:
    """What of a model its FLOPs depend on."""

    matrix_weights: int  # P
    head_weights: int  # V x M
    attention_width: int  # L x H x (D + E), of the layers with attention
    frozen_weights: int = 0  # of P
    frozen_head: int = 0  # of V x M

    @classmethod
    def of(cls, model: "PreTrainedModel") -> Self:
        """Read a model's sizes. A head that is tied to the embedding counts as a head."""
        config = model.config
        head = head_of(model).get_parameter("weight")
        outside = {id(head)} | {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dims = getattr(config, "qk_head_dim", None) or head_dim, getattr(config, "v_head_dim", None) or head_dim
        matrices = [p for p in model.parameters() if id(p) not in outside and len(whole_shape(p)) >= 2]
        return cls(
            matrix_weights=count_weights(matrices),
            head_weights=count_weights([head]),
            attention_width=layer_windows(config).total() * config.num_attention_heads * sum(dims),
            frozen_weights=count_weights(p for p in matrices if not p.requires_grad),
            frozen_head=count_weights(p for p in [head] if not p.requires_grad),
        )

    def flops(self, tokens: int, labelled: int, live_pairs: int) -> int:
        """Return the FLOPs of a forward and backward pass over `tokens`, `labelled` of which have a label."""
        matrices = (6 * self.matrix_weights - 2 * self.frozen_weights) * tokens
        head = (6 * self.head_weights - 2 * self.frozen_head) * labelled
        return matrices + head + 6 * self.attention_width * live_pairs


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the device's dense peak in FLOP/s, or None where it is not known: a CPU, another GPU, another dtype."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return None
    return peak_of(torch.cuda.get_device_name(device))


def peak_of(name: str) -> float | None:
    """Return the bfloat16 peak in FLOP/s of a GPU by the name its driver gives, or None."""
    return next((peak for known, peak in _PEAKS.items() if re.search(rf"\b{known}\b", name)), None)
