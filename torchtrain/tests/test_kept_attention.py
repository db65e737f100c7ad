"""`model.activation_checkpointing: keep_attention`: the same bits as with `true`, and no kernel runs twice."""

import gc
import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchtrain
from anchorline.errors import UserError
from torchtrain.config import ModelConfig, Recomputation, load_config
from torchtrain.modeling import recompute as kept_attention
from torchtrain.modeling.recompute import KERNELS, save_memory
from torchtrain.planning.memory import PeakBytes
from torchtrain.run.setup import set_up
from torchtrain.tests.tiny import FAMILIES, VOCABULARY, tiny_model

LAYERS, T = 3, 24
DOCUMENTS = torch.tensor([[0] + [1] * 9 + [2] * 10 + [-1] * 4, [0] + [1] * 23])


class Operations(TorchDispatchMode):
    """Counts operations by name, and the bytes that live after the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[func._schema.name] += 1
        return func(*args, **(kwargs or {}))

    @property
    def kernels(self) -> int:
        return sum(self.count[name] for name in KERNELS)


def train(family: str, dtype: torch.dtype, recomputation: Recomputation, **settings: Any) -> tuple[list, Operations]:
    """Return loss and gradients of a step, and what ran."""
    torch.manual_seed(0)
    model = torchtrain.attach(tiny_model(family, dtype=dtype, num_hidden_layers=LAYERS).train(), "sdpa")
    save_memory(model, ModelConfig(source="x", activation_checkpointing=recomputation, **settings))
    ids = torch.arange(2 * T).view(2, T)
    with Operations() as ran:
        loss = model(
            input_ids=ids,
            position_ids=torch.arange(T).expand(2, T),
            document_ids=DOCUMENTS,
            labels=ids,
            shift_labels=(ids + 1).masked_fill(DOCUMENTS < 0, -100),
            use_cache=False,
        ).loss
        loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())], ran


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_the_same_and_no_kernel_runs_twice(family, dtype):
    (none, once), (all_, twice), (kept, but_once) = (train(family, dtype, x) for x in (False, True, "keep_attention"))
    for other in (none, all_):
        assert all(torch.equal(a, b) for a, b in zip(kept, other, strict=True))
    assert 2 * once.kernels == twice.kernels > 0
    assert but_once.kernels == once.kernels
    assert but_once.count["aten::mm"] == twice.count["aten::mm"] > once.count["aten::mm"]


def test_chunks_of_a_layer_keep_attention_too():
    kept, ran = train("llama", torch.float32, "keep_attention", layer_chunk=7)
    all_, twice = train("llama", torch.float32, True, layer_chunk=7)
    assert all(torch.equal(a, b) for a, b in zip(kept, all_, strict=True))
    assert 2 * ran.kernels == twice.kernels > 0


def test_what_was_kept_goes_with_the_backward_pass():
    """And meanwhile less is held than where nothing is computed again."""
    most = {}
    for recomputation in (False, "keep_attention"):
        model = torchtrain.attach(tiny_model(num_hidden_layers=LAYERS).train(), "sdpa")
        save_memory(model, ModelConfig(source="x", activation_checkpointing=recomputation))
        ids = torch.arange(256)[None] % VOCABULARY
        given = {"position_ids": torch.arange(256)[None], "document_ids": torch.ones_like(ids)}
        held = []
        with PeakBytes(model) as watch:
            for _ in range(3):
                model.model(ids, **given, use_cache=False).last_hidden_state.sum().backward()
                model.zero_grad(set_to_none=True)
                gc.collect()
                held.append(watch.now)
        assert held[0] == held[1] == held[2]
        most[recomputation] = watch.peak - watch.now
    assert most["keep_attention"] < 0.7 * most[False]


@pytest.mark.parametrize("engine", ["flex", "dense"])
def test_an_engine_without_a_kernel_that_can_be_kept_is_refused_before_documents_and_weights_are_read(
    tree, write_config, monkeypatch, engine
):
    monkeypatch.setattr("torchtrain.run.setup.resolve_engine", lambda *_, **__: engine)
    for reads in ("prepare", "load_for_training"):
        monkeypatch.setattr(f"torchtrain.run.setup.{reads}", None)
    config = load_config(write_config(tree), ["model.activation_checkpointing=keep_attention"])
    told = rf"keep_attention: keeps nothing of this engine \(attention {engine}\); set it to true"
    with pytest.raises(UserError, match=told):
        set_up(config, print)


@pytest.mark.parametrize("seen", [True, False])
def test_a_flash_attn_that_hides_its_kernel_is_refused(monkeypatch, seen):
    monkeypatch.setattr(kept_attention, "uses_flash_attn", lambda: True)
    found = SimpleNamespace(**({"_flash_attn_varlen_forward": None} if seen else {}))
    monkeypatch.setattr(torch.ops, "flash_attn", found, raising=False)
    if seen:
        kept_attention.check_can_keep("flash")
    else:
        with pytest.raises(UserError, match=r"needs flash-attn 2\.7 or newer \(attention flash\); set it to true"):
            kept_attention.check_can_keep("flash")
    kept_attention.check_can_keep("sdpa")


@pytest.mark.parametrize("how", [True, "keep_attention", "offload", "auto"])
def test_a_family_that_cannot_recompute_is_refused(how):
    model = tiny_model()
    model.supports_gradient_checkpointing = False  # as jetmoe and ctrl say of themselves
    with pytest.raises(UserError, match=r"activation_checkpointing: .* no layers of llama; set it to false"):
        save_memory(model, ModelConfig(source="x", activation_checkpointing=how))


def test_every_kernel_is_known_to_torch_or_to_flash_attn():
    """A name that is written wrong keeps nothing, in silence."""
    importlib.import_module("torch.nn.attention.varlen")  # registers one
    known = {name for name in KERNELS if torch._C._dispatch_has_kernel(name)}
    assert KERNELS - known == {"flash_attn::_flash_attn_varlen_forward"}
