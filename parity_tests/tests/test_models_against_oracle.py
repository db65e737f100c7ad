"""Whole models, layer by layer, on the flash engine, whose kernel a CPU has only a reference of: against the oracle, by
the one rule. The other engines, variants and positions are the gate's (configs/parity/ci.yaml).
"""

import pytest
import torch

import torchtrain
from parity_tests.gate.case import FAMILIES
from parity_tests.tests.layers import compare_layers
from parity_tests.tests.models import packed_batch, tiny_model
from torchtrain.attention.hf import implementation_name
from torchtrain.tests.flash_on_cpu import FlashOnCPU


@pytest.fixture(scope="module", autouse=True)
def _plug_in():
    torchtrain.register()
    with FlashOnCPU():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models(family, dtype):
    model = tiny_model(family, dtype, implementation_name("flash"))
    report = compare_layers(model, packed_batch("anchor", vocabulary=model.config.vocab_size), "flash")
    layers = model.config.num_hidden_layers
    assert {f"layers.{layers - 1}.{name}" for name in ("q_rope", "k_rope", "attn", "mlp")} <= set(report.verdicts)
    name = report.first_divergence
    assert name is None, f"{name}: {report.verdicts[name]}"
