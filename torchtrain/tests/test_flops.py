"""The FLOP formula against torch's own counter, and the table of peaks."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torchtrain.config import LoraSettings
from torchtrain.modeling.adapters import add_adapters, layer_and_factors
from torchtrain.tests.tiny import FAMILIES, VOCABULARY, tiny_model
from torchtrain.training.flops import FlopCounter, peak_of
from torchtrain.training.labels import find_labels
from torchtrain.training.loss import chunked_cross_entropy


@pytest.mark.parametrize("family", FAMILIES)
def test_counts_what_torch_counts(family):
    model = tiny_model(family)
    model.set_attn_implementation("eager")  # plain matrix products over all T x T pairs, which the counter sees
    B, T = 2, 24
    counter = FlopCounterMode(display=False)
    with counter:
        model(torch.randint(VOCABULARY, (B, T)), use_cache=False).logits.sum().backward()
    # RoPE's angles are a batched outer product in some versions: it has no gradient and is not a weight.
    rope = sum(n for name, n in _by_operation(counter, "rotary_emb").items())
    assert counter.get_total_flops() - rope == FlopCounter.of(model).flops(B * T, B * T, B * T * T)


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products by torch's own formulas; `FlopCounterMode` cannot look into a backward pass
    that takes gradients within.
    """

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.count += formula(*args, **(kwargs or {}), out_val=made)
        return made


LORA = {
    "some": ["q_proj", "k_proj", "v_proj", "down_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "all": "all-linear",
}


@pytest.mark.parametrize("targets", [None, *LORA])
def test_counts_what_torch_counts_of_frozen_weights(targets):
    """All but what the first layer needs no gradient of: the input of q, k and v, where the embedding is frozen."""
    model = tiny_model("llama", tie_word_embeddings=False).train()
    model.set_attn_implementation("eager")
    lora = None if targets is None else LoraSettings(rank=4, target_modules=LORA[targets])  # type: ignore[arg-type]
    if lora is not None:
        add_adapters(model, lora, seed=0)
    B, T = 2, 24
    with Products() as counted:
        model(torch.randint(VOCABULARY, (B, T)), use_cache=False).logits.sum().backward()
    sizes = FlopCounter.of(model)
    predicted = sizes.flops(B * T, B * T, B * T * T)
    unneeded = 0
    if lora is not None:
        attention = model.model.layers[0].self_attn
        for module in (attention.q_proj, attention.k_proj, attention.v_proj):
            layer, adapter = layer_and_factors(module)
            unneeded += 2 * B * T * (layer.weight.numel() + (0 if adapter is None else adapter[0].weight.numel()))
    assert counted.count == predicted - unneeded


def test_a_loss_in_chunks_makes_its_logits_once():
    head, hidden = torch.nn.Linear(8, 30, bias=False), torch.randn(12, 8, requires_grad=True)
    labels = find_labels(torch.arange(12))
    with FlopCounterMode(display=False) as counted:
        chunked_cross_entropy(head, hidden, labels, chunk=5)[0].backward()
    assert counted.get_total_flops() == FlopCounter(0, 8 * 30, 0).flops(12, 12, 0)


def _by_operation(counter: FlopCounterMode, module: str) -> dict:
    return {op: n for name, ops in counter.get_flop_counts().items() if name.endswith(module) for op, n in ops.items()}


def test_layers_without_attention_have_no_pairs():
    """One of two layers is a gated delta net; each layer of Falcon-H1 has attention beside its state."""
    assert FlopCounter.of(tiny_model("qwen3_next")).attention_width == 1 * 4 * (8 + 8)
    assert FlopCounter.of(tiny_model("falcon_h1")).attention_width == 2 * 4 * (8 + 8)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("Tesla V100-SXM2-16GB", None),
        ("NVIDIA A1000", None),
    ],
)
def test_peak_by_name(name, peak):
    assert peak_of(name) == peak
