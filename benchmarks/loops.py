"""Training steps to compare: torchtrain's, and a plain loop over transformers' model."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtrain.attention.hf import implementation_name, register
from torchtrain.config import ModelConfig, TrainConfig
from torchtrain.distributed.world import World
from torchtrain.modeling.load import set_up_layers
from torchtrain.modeling.recompute import hand_layers_over
from torchtrain.training.step import make_micro_batches, take_step
from torchtrain.training.strategy import Replicated

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Row = dict[str, Tensor]  # the five arrays [1, T], on the host
_RATE = 1e-5


def make_ours(
    model: "PreTrainedModel", engine: str, settings: ModelConfig, device: torch.device
) -> Callable[[Row], object]:
    """Return a step of `torchtrain train` on a row. What a run makes ahead of a step is made once for a row."""
    register()
    model.set_attn_implementation(implementation_name(engine))
    set_up_layers(model, settings)
    train, world = TrainConfig(sequences_per_step=1, learning_rate=_RATE, steps=2**20), World(device=device)
    strategy, ready = Replicated(model, train, world), {}

    def take(row: Row) -> object:
        if id(row) not in ready:
            ready[id(row)] = make_micro_batches([row], ["text"], world, engine)
        return take_step(strategy, ready[id(row)], ["text"], 0, train, lambda loss: None)

    return take


def make_plain(
    model: "PreTrainedModel", masters: bool, device: torch.device, recomputed: bool = True
) -> Callable[[Row], object]:
    """Return a step of a plain loop with SDPA and fused AdamW, on float32 masters if that is asked for.

    Documents see each other. The row is copied to the device once.
    """
    model.set_attn_implementation("sdpa")
    if recomputed:
        hand_layers_over(model)
    weights: list[Tensor] = list(model.parameters())
    own = [x.detach().float() for x in weights] if masters else weights
    optimizer, ready = torch.optim.AdamW(own, lr=_RATE, fused=True), {}

    def take(row: Row) -> object:
        if id(row) not in ready:
            labels = F.pad(row["shift_labels"][:, :-1], (1, 0), value=-100)  # transformers shifts them itself
            ready[id(row)] = row["input_ids"].to(device), labels.to(device)
        tokens, labels = ready[id(row)]
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        if masters:
            for master, weight in zip(own, weights, strict=True):
                master.grad, weight.grad = weight.grad.float(), None  # type: ignore[union-attr]
        nn.utils.clip_grad_norm_(own, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if masters:
            torch._foreach_copy_([weight.data for weight in weights], own)
        return loss.item()

    return take
