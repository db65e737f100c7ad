"""`model.activation_checkpointing: auto`: decided by the memory that is free, said, and the same everywhere."""

import importlib
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchtrain
from anchorline.errors import UserError
from torchtrain.config import ModelConfig, Recomputation, load_config
from torchtrain.distributed.world import World
from torchtrain.modeling.recompute import KERNELS, save_memory
from torchtrain.modeling.source import open_config
from torchtrain.planning import budget
from torchtrain.run import choices as recomputation
from torchtrain.run.choices import choose_recomputation
from torchtrain.run.setup import set_up
from torchtrain.tests.tiny import FAMILIES, tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def config(tree, write_config):
    return lambda *overrides: load_config(write_config(tree), ["model.activation_checkpointing=auto", *overrides])


def needed(config, model_folder, recomputed):
    """Bytes of a run, on a CPU, where device and host are one."""
    model = config.model.model_copy(update={"activation_checkpointing": recomputed})
    shapes = budget.Shapes(open_config(str(model_folder())))
    held = budget.count_memory(config.model_copy(update={"model": model}), shapes, 1)
    return held.gpu + held.host


@pytest.mark.parametrize(
    ("kept", "share", "engine", "recomputed", "told"),
    [
        (False, 0.99, "sdpa", False, "none recomputed: "),
        (False, 1.01, "sdpa", "keep_attention", "recomputed in the backward pass, but for attention: "),
        ("keep_attention", 0.99, "sdpa", "keep_attention", "recomputed in the backward pass, but for attention: "),
        ("keep_attention", 1.01, "sdpa", True, "recomputed in the backward pass: "),
        ("keep_attention", 0.99, "flex", True, "recomputed in the backward pass: "),
    ],
)
def test_what_is_kept_must_fit_with_room_to_spare(
    config, model_folder, monkeypatch, kept, share, engine, recomputed, told
):
    loaded = config("pack.sequence_length=4096")
    free = needed(loaded, model_folder, kept) / recomputation._SHARE / share
    monkeypatch.setattr(recomputation, "free_memory", lambda device: int(free))
    settings, said = choose_recomputation(loaded, open_config(str(model_folder())), engine, World())
    assert settings == loaded.model.model_copy(update={"activation_checkpointing": recomputed})
    assert said.startswith(f"{told}keeping them takes {needed(loaded, model_folder, False) / 2**30:.1f} GiB")
    assert said.endswith("GiB are free")


def test_all_processes_do_as_the_one_with_least_memory_must(config, model_folder, monkeypatch):
    monkeypatch.setattr(recomputation, "free_memory", lambda device: 2**40)
    monkeypatch.setattr(World, "sum", lambda self, values: [values[0] * self.size - 1])  # of another, it does not fit
    settings, _ = choose_recomputation(config(), open_config(str(model_folder())), "sdpa", World(0, 2))
    assert settings.activation_checkpointing is True


@pytest.mark.parametrize("free", [0, 2**40])
def test_the_run_does_what_was_chosen_and_says_so(config, monkeypatch, free):
    monkeypatch.setattr(recomputation, "free_memory", lambda device: free)
    said = []
    setup = set_up(config(), said.append)
    assert any(layer.gradient_checkpointing for layer in setup.model.model.layers) is (free == 0)
    assert setup.record.activation_checkpointing is (free == 0)
    (line,) = [line for line in said if line.startswith("layers    ")]
    assert line.endswith("GiB are free" if free else "the free memory is not known")


# --- keep_attention ---------------------------------------------------------------------------------------------------


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


@pytest.mark.one_of(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_are_the_same_and_no_kernel_runs_twice(family, dtype):
    (none, once), (all_, twice), (kept, but_once) = (train(family, dtype, x) for x in (False, True, "keep_attention"))
    for other in (none, all_):
        assert all(torch.equal(a, b) for a, b in zip(kept, other, strict=True))
    assert 2 * once.kernels == twice.kernels > 0
    assert but_once.kernels == once.kernels
    assert but_once.count["aten::mm"] == twice.count["aten::mm"] > once.count["aten::mm"]


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
    assert KERNELS - known == {"flash_attn::_flash_attn_varlen_forward", "cudnn::sdpa_fwd"}
