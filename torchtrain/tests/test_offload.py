"""`model.activation_checkpointing: offload`: the same numbers, whenever copies arrive, and memory that comes back."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torchtrain.config import ModelConfig
from torchtrain.modeling.recompute import HostMemory, count_host_bytes, save_memory
from torchtrain.tests.tiny import tiny_model

LAYERS = 5


def model_of(recomputed: Any, host: HostMemory | None = None) -> Any:
    model = tiny_model(dtype=torch.bfloat16, num_hidden_layers=LAYERS).train()
    save_memory(model, ModelConfig(source="x", activation_checkpointing=recomputed))
    if host is not None:
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = host.checkpoint
    return model


def train(model: Any, micro_batches: int = 2) -> list[Tensor]:
    """Losses and gradients of some micro-batches of other lengths."""
    losses = []
    for number in range(micro_batches):
        ids = torch.arange(40 + 10 * number).view(2, -1)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in model.parameters())]


def assert_same(found: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True))


class Late:
    """A stream on which nothing is copied before somebody waits for it."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []
        self.done = self.most = 0

    def run(self, copy: Callable[[], None]) -> int:
        self.due.append(copy)
        self.most = max(self.most, len(self.due))
        return self.done + len(self.due)

    def wait(self, copied: int) -> None:
        while self.done < copied:
            self.due.pop(0)()
            self.done += 1


@pytest.fixture
def garbage(monkeypatch):
    """What was not written yet is not a number."""
    empty = torch.empty

    def fill(*args: Any, **kwargs: Any) -> Tensor:
        made = empty(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(255)

    monkeypatch.setattr(torch, "empty", fill)


def test_losses_and_gradients_have_the_same_bits():
    assert_same(train(model_of("offload")), train(model_of(True)))


def test_copies_may_arrive_as_late_as_they_are_waited_for(garbage):
    """No input is dropped whose copy was not waited for: one is on its way at a time."""
    late = Late()
    assert_same(train(model_of("offload", HostMemory(late))), train(model_of(True)))
    assert late.done == 2 * (2 * LAYERS - 1), "each went out, and all but the last came back"
    assert late.most == 1


def test_memory_of_the_host_is_what_is_planned_and_comes_back():
    host = HostMemory()
    model = model_of("offload", host)
    gc.disable()
    try:
        for _ in range(3):
            train(model)
            blocks = sum(block.nbytes for block in host._free)
            assert blocks == count_host_bytes(model, 2 * 40), "no more with each pass, and all free after it"
        model(input_ids=torch.arange(40).view(2, -1), use_cache=False)  # whose backward pass never comes
        assert sum(block.nbytes for block in host._free) == blocks
    finally:
        gc.enable()


def test_a_second_backward_pass_finds_the_inputs_again():
    found = []
    for recomputed in ("offload", True):
        model, ids = model_of(recomputed), torch.arange(40)[None]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([p.grad for p in model.parameters()])
    assert_same(*found)
