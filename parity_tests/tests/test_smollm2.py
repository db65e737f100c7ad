"""SmolLM2-135M with its real weights, all 30 layers, against the oracle, which also reads the file itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import torchtrain
from jaxref.weights import load_hf, to_arrays
from parity_tests.oracle import oracle_of
from parity_tests.tests.layers import compare_layers
from parity_tests.tests.models import text_batch
from torchtrain.modeling.smollm2 import smollm2_folder

CACHE = Path(__file__).parents[2] / "cache"


@pytest.fixture(scope="module")
def folder():
    torchtrain.register()
    return smollm2_folder(CACHE)


@pytest.fixture(scope="module")
def batch(folder):
    return text_batch(AutoTokenizer.from_pretrained(folder), "anchor", tokens=96)


def load(folder, dtype, **changes):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="anchor", **changes).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_tap_of_every_layer(folder, batch, dtype):
    report = compare_layers(load(folder, dtype), batch, "sdpa")
    assert len([name for name in report.verdicts if name.endswith("k_rope")]) == 30
    name = report.first_divergence
    assert name is None, f"{name}: {report.verdicts[name]}"


def test_a_position_off_by_one_is_named_where_it_happens(folder, batch):
    """The comparison is worth what it catches: one document shifted by one position, in the candidate only."""
    model = load(folder, torch.bfloat16, num_hidden_layers=2)  # the first ones, of 30
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids + (position_ids > 50))
    report = compare_layers(model, batch, "sdpa")
    assert report.first_divergence in ("layers.0.q_rope", "layers.0.k_rope")


def test_the_oracle_reads_the_same_weights_from_the_safetensors(folder):
    ours, theirs = (to_arrays(x) for x in (load_hf(folder)[1], oracle_of(load(folder, torch.float32))))
    assert ours.keys() == theirs.keys()
    assert [name for name, array in ours.items() if not np.array_equal(array, theirs[name])] == []
