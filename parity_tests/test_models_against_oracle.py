"""Whole models, layer by layer: transformers with our engines against the oracle, by the one rule."""

import pytest
import torch

import torchtrain
from parity_tests.layers import compare_layers
from parity_tests.models import FAMILIES, packed_batch, tiny_model
from torchtrain.attention.hf import implementation_name
from torchtrain.tests.flash_on_cpu import FlashOnCPU


@pytest.fixture(scope="module", autouse=True)
def _plug_in():
    torchtrain.register()
    with FlashOnCPU():
        yield


def assert_every_tap_passes(model, batch, engine):
    report = compare_layers(model, batch, engine)
    layers = model.config.num_hidden_layers
    assert {f"layers.{layers - 1}.{name}" for name in ("q_rope", "k_rope", "attn", "mlp")} <= set(report.verdicts)
    name = report.first_divergence
    assert name is None, f"{name}: {report.verdicts[name]}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["sdpa", "dense", "flash"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family, engine, dtype):
    model = tiny_model(family, dtype, implementation_name(engine))
    assert_every_tap_passes(model, packed_batch("anchor", vocabulary=model.config.vocab_size), engine)


@pytest.mark.parametrize("variant", ["full", "intra", "intra_reset", "anchor+tag", "anchor+interleave"])
def test_every_variant(variant):
    model = tiny_model("llama", torch.bfloat16, "anchor")
    assert_every_tap_passes(model, packed_batch(variant, vocabulary=model.config.vocab_size), "sdpa")


@pytest.mark.parametrize("offset", [8192, 131072 - 64])
def test_large_positions(offset):
    model = tiny_model("llama", torch.bfloat16, "anchor")
    batch = packed_batch("anchor", vocabulary=model.config.vocab_size)
    batch["position_ids"] = batch["position_ids"] + offset
    assert_every_tap_passes(model, batch, "sdpa")
