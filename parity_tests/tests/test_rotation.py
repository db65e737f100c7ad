"""`model.rotation: float32` against the oracle's `paper_bf16`, at the positions of 128K tokens.

Legend: B batch · T tokens of a row · H heads · D head_dim.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torchtrain
from anchorline.errors import UserError
from anchorline.tolerance import judge
from jaxref.rope import rotate
from jaxref.rounding import preset
from parity_tests.gate.case import FAMILIES
from parity_tests.taps import capture_taps
from parity_tests.tests.layers import compare_layers
from parity_tests.tests.models import packed_batch, tiny_model
from torchtrain.attention.hf import implementation_name
from torchtrain.modeling.rotation import check_rotation, rotate_in_float32

FAR = 131_072
EAGER, PAPER = preset("hf_eager_bf16"), preset("paper_bf16")


@pytest.fixture(scope="module", autouse=True)
def _plug_in():
    torchtrain.register()


def model_of(family: str, rotated: bool = True, **changes):
    model = tiny_model(family, torch.bfloat16, implementation_name("sdpa"), max_position_embeddings=FAR, **changes)
    if rotated:
        rotate_in_float32(model)
        check_rotation(model)
    return model


def far_batch() -> dict[str, torch.Tensor]:
    """Three documents whose positions run to 128K, as in the last tokens of a long row."""
    batch = packed_batch("anchor")
    start = FAR - batch["position_ids"].shape[1]
    return batch | {"position_ids": batch["position_ids"] + start}


def queries(model, batch) -> tuple[np.ndarray, np.ndarray, tuple[torch.Tensor, torch.Tensor]]:
    """q before and behind the first layer's rotation [B, T, H, D], and the tables [B, T, D] it was rotated with."""
    tables = {}
    model.model.rotary_emb.register_forward_hook(lambda *seen: tables.update(first=seen[-1]))
    taps = capture_taps(model, **batch)
    return taps.get("layers.0.q_norm", taps["layers.0.q"]), taps["layers.0.q_rope"], tables["first"]


@pytest.mark.parametrize("family", FAMILIES)
def test_queries_are_rotated_in_float32_and_rounded_once(family):
    batch = far_batch()
    before, behind, (cos, sin) = queries(model_of(family), batch)
    assert cos.dtype == sin.dtype == torch.float32
    half = cos.shape[-1] // 2
    tables = [jnp.asarray(table[..., :half].numpy()) for table in (cos, sin)]
    ours = rotate(jnp.asarray(before), *tables, PAPER, "q_rotated")
    np.testing.assert_array_equal(ours, torch.from_numpy(behind).bfloat16().float().numpy())
    _, theirs, _ = queries(model_of(family, rotated=False), batch)
    assert (np.asarray(ours) != theirs).any(), "rotated in the model's dtype the queries are others"


def test_layers_are_within_the_rule_of_the_papers_arithmetic():
    """Against what `paper_bf16` errs, which is less than what the model's own rotation does."""
    model, batch = model_of("llama"), far_batch()
    report = compare_layers(model, batch, "sdpa", rounding="paper_bf16")
    assert report.first_divergence is None, report.worst


def test_gradients_pass_through_the_rotation():
    model, batch = model_of("llama").train(), far_batch()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model(**batch, use_cache=False).logits.float().square().mean().backward()
    gradient = model.model.layers[0].self_attn.q_proj.weight.grad
    assert gradient.dtype == torch.bfloat16
    wide = tiny_model("llama", torch.float64, implementation_name("dense"), max_position_embeddings=FAR)
    wide.load_state_dict(model.state_dict())
    wide(**batch, use_cache=False).logits.square().mean().backward()
    truth = wide.model.layers[0].self_attn.q_proj.weight.grad
    plain = model_of("llama", rotated=False).train()
    plain(**batch, use_cache=False).logits.float().square().mean().backward()
    verdict = judge(
        gradient.float().numpy(),
        truth.numpy(),
        plain.model.layers[0].self_attn.q_proj.weight.grad.float().numpy(),
        "bfloat16",
    )
    assert verdict.passed, verdict


def test_a_rotation_that_is_cast_elsewhere_is_refused():
    model = model_of("llama", rotated=False)
    with pytest.raises(
        UserError, match=r"model\.rotation: llama cannot be made to .* its attention gets bfloat16: it casts"
    ):
        check_rotation(model)
