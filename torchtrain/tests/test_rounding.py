"""bfloat16's rounding of q and k, emulated in float32, before and after RoPE."""

import pytest
import torch

from anchorline.errors import UserError
from torchtrain.attention import make_plan
from torchtrain.attention.hf import register
from torchtrain.attention.rounding import round_mantissa
from torchtrain.modeling.head import hidden_states
from torchtrain.modeling.rotation import round_queries_and_keys
from torchtrain.tests.tiny import tiny_model


def test_seven_bits_are_bfloat16_forward_and_backward():
    x = (torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e3).requires_grad_()
    weights = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    rounded = round_mantissa(x, 7)
    (rounded * weights).sum().backward()
    assert torch.equal(rounded, x.bfloat16().float())
    assert x.grad is not None
    assert torch.equal(x.grad, weights.bfloat16().float())


@pytest.mark.parametrize("place", ["before_rope", "after_rope"])
def test_only_rounding_after_rope_breaks_relativity(place):
    register()
    exact, rounded = tiny_model(), tiny_model()
    rounded.load_state_dict(exact.state_dict())
    for model in (exact, rounded):
        model.set_attn_implementation("anchor_segments")
    round_queries_and_keys(rounded, place, 3)
    ids = torch.randint(3, 40, (1, 24))

    def outputs(model, start):
        batch = {"input_ids": ids, "position_ids": start + torch.arange(24)[None], "document_ids": torch.ones_like(ids)}
        with torch.no_grad():
            return hidden_states(model, batch, make_plan(torch.ones_like(ids)))

    def moved(one, other):
        return float((one - other).abs().max())

    noise = moved(outputs(exact, 0), outputs(exact, 37))
    assert moved(outputs(rounded, 0), outputs(exact, 0)) > 100 * noise  # it does round
    shifted = moved(outputs(rounded, 0), outputs(rounded, 37))
    assert shifted > 100 * noise if place == "after_rope" else shifted < 100 * noise


def test_it_is_for_projections_that_rope_follows():
    with pytest.raises(UserError, match="not q_proj and k_proj, then RoPE"):
        round_queries_and_keys(torch.nn.Linear(2, 2), "after_rope", 7)
