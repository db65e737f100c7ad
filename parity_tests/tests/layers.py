"""One model on both sides, layer by layer: which tap breaks the rule first, and by how much.

The candidate is a transformers model with any attention implementation; truth is the oracle in float64 on the
candidate's own (already rounded) weights; the allowance is what the oracle errs under the candidate's rounding preset.

Legend: B batch · T tokens of a row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from anchorline.tolerance import Verdict, judge
from jaxref.rounding import preset
from parity_tests.oracle import oracle_taps, preset_name
from parity_tests.taps import capture_taps
from parity_tests.tests.models import oracle_of


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


def compare_layers(
    model: nn.Module, batch: dict[str, Tensor], engine: str, query_block: int | None = None, rounding: str | None = None
) -> LayerReport:
    """Compare every tap of `model`'s forward pass with the oracle's.

    model: a transformers decoder whose attention implementation is already set.
    batch: `input_ids`, `position_ids`, `document_ids`, int64 [B, T], on the model's device.
    engine: what the attention implementation runs (`sdpa`, `flash`, `flex`, `dense`); it names the rounding preset.
    query_block: queries at a time of the oracle's attention; None is dense.
    rounding: the preset that sets the allowance, where it is not the engine's own.
    """
    dtype = next(model.parameters()).dtype
    decoder = oracle_of(model)
    inputs = {name: batch[name] for name in ("input_ids", "position_ids", "document_ids")}
    candidate = capture_taps(model, **inputs)
    truth = oracle_taps(decoder, inputs, preset("exact"), query_block)
    reference = oracle_taps(decoder, inputs, preset(rounding or preset_name(engine, dtype)), query_block)
    judged_as = str(torch.float32 if dtype == torch.float64 else dtype).removeprefix("torch.")
    shared = [name for name in truth if name in candidate]
    missing = set(candidate) - set(shared)
    assert not missing, f"the oracle has no tap {sorted(missing)}"
    return LayerReport({name: judge(candidate[name], truth[name], reference[name], judged_as) for name in shared})
