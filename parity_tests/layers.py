"""One model on both sides, layer by layer: which tap breaks the rule first, and by how much.

The candidate is a transformers model with any attention implementation; truth is the oracle in float64 on the candidate's
own (already rounded) weights; the allowance is what the oracle errs under the candidate's rounding preset.

Legend: B batch · T tokens of a row.
"""

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor, nn

from jaxref.decoder_config import DecoderConfig
from jaxref.model import Decoder
from jaxref.rounding import Rounding, preset
from jaxref.weights import from_arrays
from parity_tests.taps import Taps, capture_taps
from parity_tests.tolerance import Verdict, judge

# The order in which one layer computes its taps; the oracle's come back sorted by name.
_LAYER_ORDER = (
    *("input_norm", "q", "k", "v", "q_norm", "k_norm", "q_rope", "k_rope", "lse", "attn", "attn_out"),
    *("attn_residual", "post_norm", "mlp", "residual"),
)

_HALF = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


@dataclass(frozen=True)
class LayerReport:
    """Verdicts by tap, in the order in which the forward pass makes them."""

    verdicts: dict[str, Verdict]

    @property
    def first_divergence(self) -> str | None:
        """Name of the first tap that breaks the rule, or None."""
        return next((name for name, verdict in self.verdicts.items() if not verdict.passed), None)

    @property
    def worst(self) -> tuple[str, Verdict]:
        """The tap with the largest error over allowance."""
        return max(self.verdicts.items(), key=lambda item: item[1].ratio)


def preset_name(engine: str, dtype: torch.dtype) -> str:
    """The oracle's rounding preset of an engine: `dense` rounds like transformers' eager, the others like FlashAttention.

    float64 has no roundings of its own to allow and is judged by what float32 errs.
    """
    eager = engine in ("dense", "eager")
    if dtype in (torch.float32, torch.float64):
        return "fp32" if eager else "flash_fp32"
    suffix = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return f"hf_eager_{suffix}" if eager else f"flash_{suffix}"


def to_numpy(x: Tensor) -> np.ndarray:
    """Torch tensor to numpy, bit for bit; bfloat16 becomes ml_dtypes' bfloat16."""
    x = x.detach().cpu()
    return x.view(torch.int16).numpy().view(_HALF[x.dtype]) if x.dtype in _HALF else x.numpy()


def oracle_of(model: Any) -> Decoder:
    """Build the oracle's decoder on the weights of a transformers model, as they are rounded there."""
    arrays = {name: to_numpy(x) for name, x in model.state_dict().items()}
    return from_arrays(DecoderConfig.from_hf(model.config.to_dict()), arrays)


def oracle_taps(decoder: Decoder, batch: dict[str, Tensor], rounding: Rounding, block: int | None = None) -> Taps:
    """Run the oracle on a batch of the five arrays and return its taps as float64."""
    ids, positions, documents = (batch[name].cpu().numpy() for name in ("input_ids", "position_ids", "document_ids"))
    _, taps = decoder(ids, positions, documents, rounding, block=block, taps=True)
    return {name: np.asarray(taps[name], dtype=np.float64) for name in sorted(taps, key=forward_order)}


def forward_order(name: str) -> tuple[int, int, int]:
    """Sort key of a tap: the order in which the forward pass makes them."""
    if name.startswith("layers."):
        _, layer, tap = name.split(".")
        return 1, int(layer), _LAYER_ORDER.index(tap)
    return {"embed": (0, 0, 0), "final_norm": (2, 0, 0), "logits": (2, 0, 1)}[name]


def compare_layers(model: nn.Module, batch: dict[str, Tensor], engine: str, block: int | None = None) -> LayerReport:
    """Compare every tap of `model`'s forward pass with the oracle's.

    Args:
        model: a transformers decoder whose attention implementation is already set.
        batch: `input_ids`, `position_ids`, `document_ids`, int64 [B, T], on the model's device.
        engine: what the attention implementation runs (`sdpa`, `flash`, `flex`, `dense`); it names the rounding preset.
        block: query block of the oracle's attention; None is dense.
    """
    dtype = next(model.parameters()).dtype
    decoder = oracle_of(model)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "document_ids")}
    candidate = capture_taps(model, **inputs)
    truth = oracle_taps(decoder, inputs, preset("exact"), block)
    reference = oracle_taps(decoder, inputs, preset(preset_name(engine, dtype)), block)
    judged_as = str(torch.float32 if dtype == torch.float64 else dtype).removeprefix("torch.")
    shared = [name for name in truth if name in candidate]
    missing = set(candidate) - set(shared)
    assert not missing, f"the oracle has no tap {sorted(missing)}"
    return LayerReport({name: judge(candidate[name], truth[name], reference[name], judged_as) for name in shared})
