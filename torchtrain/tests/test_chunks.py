"""`model.layer_chunk`: norms and MLPs a chunk of tokens at a time, against the plain modules."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, GemmaConfig, GPT2Config, MixtralConfig, Qwen2MoeConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from anchorline.errors import UserError
from torchtrain.config import ModelConfig
from torchtrain.modeling import chunks
from torchtrain.modeling.chunks import check_chunks, chunk_layers
from torchtrain.modeling.recompute import save_memory
from torchtrain.tests.error_ratio import error_ratio
from torchtrain.tests.tiny import FAMILIES, SIZES, tiny_config, tiny_model

TOKENS = 40


def settings(**changes: Any) -> ModelConfig:
    return ModelConfig(source="x", **changes)


def module_of(kind: str, dtype: torch.dtype) -> nn.Module:
    """A module of one layer, with weights that are the same in every dtype but for their rounding to bfloat16."""
    torch.manual_seed(0)
    module = LlamaMLP(tiny_config(mlp_bias=kind == "mlp with biases")) if "mlp" in kind else LlamaRMSNorm(32)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    return module.to(dtype)


def run(module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Output, gradient of the input, gradients of the weights."""
    x = x.detach().clone().requires_grad_()
    made = module(x)
    made.backward(gradient)
    return [made.detach(), x.grad, *(p.grad for p in module.parameters())]  # type: ignore[list-item]


def truth_of(kind: str, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """In float64, the norm's root mean square too, which transformers takes in float32."""
    module = module_of(kind, torch.float64)
    if kind == "norm":
        module.forward = lambda x: module.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return run(module, x.double(), gradient.double())


def chunked(kind: str, dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    module = module_of(kind, dtype)
    form = chunks._RMSNorm(module) if kind == "norm" else chunks._GatedMLP(module)
    monkeypatch.setattr(chunks, "_forms", lambda model: iter([form]))
    chunk_layers(module, tokens)
    return module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["mlp", "mlp with biases", "norm"])
def test_a_module_in_chunks_errs_no_more_than_the_rule_allows(kind, dtype, monkeypatch):
    torch.manual_seed(1)
    x, gradient = (torch.randn(2, TOKENS, 32).bfloat16().to(dtype) for _ in range(2))
    truth, plain = truth_of(kind, x, gradient), run(module_of(kind, dtype), x, gradient)
    for tokens in (1, 7, 80, 10**6):
        found = run(chunked(kind, dtype, tokens, monkeypatch), x, gradient)
        for name, mine, exact, theirs in zip("yxwwwwww", found, truth, plain, strict=False):
            assert mine.dtype == dtype
            assert error_ratio(mine, exact, theirs, dtype) <= 1, (name, tokens)


def test_gradients_of_chunks_add_up_in_float32(monkeypatch):
    """1 + 300 x 2^-9, a token to a chunk: bfloat16 additions one by one would never leave 1."""
    norm = chunked("norm", torch.bfloat16, 1, monkeypatch)
    gradient = torch.full((1, 301, 32), 2**-9, dtype=torch.bfloat16)
    gradient[:, 0] = 1
    _, _, found = run(norm, torch.ones(1, 301, 32, dtype=torch.bfloat16), gradient)
    assert (found == torch.tensor(1 + 300 * 2**-9, dtype=torch.bfloat16)).all()


def step(model: Any) -> list[Tensor]:
    """Logits, the gradient of the embedded tokens, those of all weights. Of half of one row a loss is taken."""
    ids = torch.arange(2 * TOKENS).view(2, TOKENS)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits
    logits[0, : TOKENS // 2].square().sum().backward()
    assert not embedded.grad[1].any(), "another row"
    assert not embedded.grad[0, TOKENS // 2 :].any(), "later tokens"
    return [logits.detach(), embedded.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def exact(family: str, dtype: torch.dtype) -> nn.Module:
    """The model in float64, its norms too, which transformers takes in float32."""
    model = tiny_model(family, dtype=dtype).double()
    for norm in (m for m in model.modules() if hasattr(m, "variance_epsilon")):
        norm.forward = lambda x, norm=norm: (
            norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
        )
    return model


@pytest.mark.one_of(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_in_chunks_errs_no_more_than_the_rule_allows(family, dtype):
    """And has the same bits however its layers are recomputed. In one chunk, it has the plain model's logits; products
    of fewer rows may add up in another order.
    """
    truth, plain = step(exact(family, dtype)), step(tiny_model(family, dtype=dtype).train())

    def chunked(**changes: Any) -> list[Tensor]:
        model = tiny_model(family, dtype=dtype).train()
        check_chunks(model)
        save_memory(model, settings(**changes))
        return step(model)

    assert torch.equal(chunked(layer_chunk=2 * TOKENS)[0], plain[0])
    found = chunked(layer_chunk=7)
    assert len(found) == len(plain)
    for number, (mine, right, theirs) in enumerate(zip(found, truth, plain, strict=True)):
        assert error_ratio(mine, right, theirs, dtype) <= 1, number
    for recomputed in (True, "offload"):
        again = chunked(layer_chunk=7, activation_checkpointing=recomputed)
        assert all(torch.equal(a, b) for a, b in zip(again, found, strict=True))


class Sizes(TorchDispatchMode):
    """Notes how wide what is made is: elements of the largest tensor."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.largest = max(self.largest, *(x.numel() for x in tree_leaves(made) if isinstance(x, Tensor)), 0)
        return made


@pytest.mark.parametrize("chunk", [None, 16])
def test_nothing_as_wide_as_an_mlp_exists_for_all_tokens(chunk):
    wide = 1024  # than which nothing else of a token is wider
    model = tiny_model(intermediate_size=wide).train()
    save_memory(model, settings(layer_chunk=chunk, activation_checkpointing=True))
    ids = torch.ones(1, 512, dtype=torch.long)
    with Sizes() as sizes:
        model(ids, use_cache=False).logits.sum().backward()
    assert (sizes.largest >= wide * 512) is (chunk is None)


SMALL = {name: size for name, size in SIZES.items() if name not in ("head_dim", "intermediate_size")}
OTHERS = {
    "GPT2MLP": GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1),
    "GemmaRMSNorm": GemmaConfig(**SMALL, head_dim=8, intermediate_size=48),
    "MixtralSparseMoeBlock|MixtralMoE|what follows": MixtralConfig(**SMALL, intermediate_size=48, num_local_experts=2),
    "Qwen2MoeSparseMoeBlock": Qwen2MoeConfig(**SMALL, num_experts=2, num_experts_per_tok=1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_layers_are_refused_in_one_line(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(OTHERS[name])
    with pytest.raises(UserError, match=rf"^model\.layer_chunk: .*({name}).*; set model\.layer_chunk to null") as said:
        chunk_layers(model, 7)
    assert "\n" not in str(said.value)


@pytest.mark.parametrize("part", ["mlp", "input_layernorm"])
def test_what_looks_alike_and_computes_something_else_is_refused(part):
    model = tiny_model()
    module = getattr(model.model.layers[0], part)
    real = type(module).forward
    name = "OtherMLP" if part == "mlp" else "OtherRMSNorm"
    other = type(name, (type(module),), {"forward": lambda self, x: real(self, x) * (1 + 2**-20)})
    module.__class__ = other
    check_chunks(tiny_model())
    with pytest.raises(UserError, match=f"its {name} computes something else"):
        check_chunks(model)
