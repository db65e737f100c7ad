"""`model.fused: compile`: what Inductor is handed. `parity_tests.tests.compiled` judges the result.

A backend that runs the graph as it is computes bit for bit what the model does by itself, so every bit that differs
would be a fault of how the layers are compiled.
"""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from parity_tests.tests.compiled import far_batches, model_of, train_on
from torchtrain.modeling import compilation
from torchtrain.modeling.head import hidden_states

# Dynamo looks at every tensor's gradient, and expects this of those that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture
def backend(monkeypatch):
    """Return a function that chooses torch.compile's backend; what it leaves in the process is undone."""
    before = dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit

    def choose(name: str) -> None:
        compiling = functools.partial(torch.compile, dynamic=False, backend=name)
        monkeypatch.setattr(compilation, "_compile", functools.cache(compiling))

    counters.clear()
    choose("eager")
    yield choose
    dynamo.recompile_limit, dynamo.fail_on_recompile_limit_hit = before
    torch.compiler.reset()
    counters.clear()


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


RECOMPUTED = {"activation_checkpointing": True}
CASES = [("llama", "float32", "dense", RECOMPUTED, "aot_eager"), ("qwen3", "model", "sdpa", {}, "eager")]


@pytest.mark.parametrize(("family", "rotation", "engine", "settings", "through"), CASES)
def test_a_layer_is_compiled_once_and_breaks_at_attention_alone(backend, family, rotation, engine, settings, through):
    backend(through)
    model = model_of(family, "bfloat16", rotation, engine, fused="compile", **settings)
    plain = model_of(family, "bfloat16", rotation, engine)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        hidden_states(model.eval(), far_batches()[0])
    assert not counters["stats"], "what does not train is as it was loaded"
    model.train()
    for number, batch in enumerate(far_batches()):
        assert equal(train_on(model, batch), train_on(plain, batch))
        if not number:
            once = dict(counters["stats"])
    # What is before attention, and what is behind it. All layers share both.
    assert once["unique_graphs"] == 2
    assert counters["stats"] == once, "other documents are no reason to compile again"
    assert counters["aot_autograd"]["ok"] == (2 if through == "aot_eager" else 0), "backward passes"
    (why,) = counters["graph_break"]
    assert "torch.compiler.disable" in why
    assert "attention stands apart" in why


def test_a_layer_may_hand_its_whole_call_over(backend, monkeypatch):
    """As those of transformers 5.17 do, which recompute what they are called with, hooks and all."""
    plain, batch = model_of("llama", "bfloat16"), far_batches()[0]
    wanted = train_on(plain, batch)
    call = nn.Module.__call__

    def hand_over(layer, *args, **kwargs):
        return layer._gradient_checkpointing_func(functools.partial(call.__get__(layer), **kwargs), *args)

    monkeypatch.setattr(LlamaDecoderLayer, "__call__", hand_over)
    monkeypatch.setattr(LlamaDecoderLayer, "forward", LlamaDecoderLayer.forward.__wrapped__)
    model = model_of("llama", "bfloat16", fused="compile", activation_checkpointing=True)
    assert equal(train_on(model, batch), wanted)
    assert counters["stats"]["unique_graphs"] == 2
    assert len(counters["graph_break"]) == 1


def test_what_is_compiled_too_often_fails_and_an_earlier_model_does_not_count(backend):
    """Beyond its limit, torch runs a function as it is, in silence."""
    rows = {name: x[:, :12] for name, x in far_batches()[0].items()}
    for batch in (far_batches()[0], rows):
        model = model_of("llama", "bfloat16", fused="compile")
        dynamo.recompile_limit = 1
        train_on(model, batch)
    with pytest.raises(FailOnRecompileLimitHit):
        train_on(model, {name: x[:, :10] for name, x in rows.items()})
