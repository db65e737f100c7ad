"""`model.fused: compile`: what Inductor is handed. `python -m parity_tests.compiled` judges what it makes of that.

A backend that runs the graph as it is computes bit for bit what the model does by itself, so every bit that differs
would be a fault of how the layers are compiled.
"""

import functools

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from parity_tests.compiled import far_batches, model_of, train_on
from parity_tests.models import FAMILIES
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


CASES = [
    *((family, {}, "model", "sdpa") for family in FAMILIES),
    ("llama", {"activation_checkpointing": True}, "float32", "dense"),
]


@pytest.mark.parametrize(("family", "settings", "rotation", "engine"), CASES)
def test_a_layer_is_compiled_once_and_breaks_at_attention_alone(backend, family, settings, rotation, engine):
    model = model_of(family, "bfloat16", rotation, engine, fused="compile", **settings)
    plain = model_of(family, "bfloat16", rotation, engine)
    for number, batch in enumerate(far_batches()):
        assert equal(train_on(model, batch), train_on(plain, batch))
        if not number:
            once = dict(counters["stats"])
    # Before attention two frames, the layer's and its attention's; behind it what remains of both. All layers share it.
    assert once["unique_graphs"] == 4
    assert counters["stats"] == once, "other documents are no reason to compile again"
    (why,) = counters["graph_break"]
    assert "torch.compiler.disable" in why
    assert "attention stands apart" in why


def test_the_backward_pass_is_compiled_too(backend):
    backend("aot_eager")
    model = model_of("llama", "bfloat16", fused="compile", activation_checkpointing=True)
    plain, batch = model_of("llama", "bfloat16"), far_batches()[0]
    assert equal(train_on(model, batch), train_on(plain, batch))
    assert counters["aot_autograd"]["ok"] == 4


def test_what_does_not_train_is_as_it_was_loaded(backend):
    model, plain = model_of("llama", "bfloat16", fused="compile"), model_of("llama", "bfloat16")
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        hidden_states(model.eval(), far_batches()[0])
    assert not counters["stats"]


def test_too_many_compilations_are_no_reason_to_go_on_without(backend):
    """Where torch has compiled a function for a number of shapes, it runs all others as they are, in silence."""
    model = model_of("llama", "bfloat16", fused="compile")
    batch = far_batches()[0]
    dynamo.recompile_limit = 1
    train_on(model, batch)
    with pytest.raises(FailOnRecompileLimitHit):
        train_on(model, {name: x[:, :10] for name, x in batch.items()})


def test_an_earlier_model_does_not_count(backend):
    batch = far_batches()[0]
    for tokens in (10, 12):
        model = model_of("llama", "bfloat16", fused="compile")
        dynamo.recompile_limit = 1
        train_on(model, {name: x[:, :tokens] for name, x in batch.items()})
