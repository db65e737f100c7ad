"""How a bug reaches into the candidate: context managers over attributes of torchtrain, transformers and torch.

Legend: B batch · T tokens of a row · H query heads · K key/value heads · D head_dim.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from torchtrain.attention import hf
from torchtrain.attention.engines import choice
from torchtrain.attention.plan import make_plan
from torchtrain.training.micro_batch import make_micro_batch
from torchtrain.training.schedule import learning_rate
from torchtrain.training.strategy import Replicated

Context = AbstractContextManager[Any]
Around = Callable[..., Any]  # takes the function that it replaces before its arguments

# Family -> the prefix of its classes.
FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
FAMILIES |= {"granite": "Granite", "glm4_moe": "Glm4Moe"}
# `from x import f` leaves a name for f in the importing module: a bug in f must be seen under each. The judge's own
# modules count where they call the candidate.
_WHERE_NAMES_ARE = ("torchtrain.", "parity_tests.gate", "parity_tests.tests.engines")


@contextmanager
def swap(function: Callable[..., Any], replacement: Callable[..., Any]) -> Iterator[None]:
    """Put `replacement` wherever a module of the candidate holds `function` under a name."""
    with ExitStack() as stack:
        places = [
            (module, name)
            for module_name, module in list(sys.modules.items())
            if f"{module_name}.".startswith(_WHERE_NAMES_ARE)
            for name, value in list(vars(module).items())
            if value is function
        ]
        assert places, f"nobody holds {function}"
        for module, name in places:
            stack.enter_context(patch.object(module, name, replacement))
        yield


def around(function: Callable[..., Any], replacement: Around) -> Context:
    """`swap` with a function that takes the one that it replaces before its arguments."""
    return swap(function, partial(replacement, function))


def method(owner: Any, name: str, replacement: Around) -> Context:
    """Replace a method of a class by a function that takes the one that it replaces before its arguments."""
    original = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))


@contextmanager
def in_every_family(class_name: str, name: str, replacement: Around) -> Iterator[None]:
    """Replace a method of a class that every family has its own of: `RMSNorm`, `MLP`, `RotaryEmbedding`, ...

    Llama's stands in where a family borrows it.
    """
    with ExitStack() as stack:
        for family, prefix in FAMILIES.items():
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            cls = getattr(modeling, f"{prefix}{class_name}", None)
            if cls is not None and name in vars(cls):
                stack.enter_context(method(cls, name, replacement))
        yield


@contextmanager
def rotation(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Replace transformers' `apply_rotary_pos_emb` by `rotate(q_BHTD, k_BKTD, cos_B1TD, sin_B1TD)`."""

    def broadcast(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return rotate(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))

    with ExitStack() as stack:
        for family in FAMILIES:
            modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            stack.enter_context(patch.object(modeling, "apply_rotary_pos_emb", broadcast))
        yield


def tables(make: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Context:
    """Replace what makes cos and sin by `make(rotary, position_ids_BT, inv_freq_C)`, each [B, T, 2 C] float32."""

    @torch.no_grad()
    def forward(original: Any, self: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        original(self, x, position_ids)  # `dynamic` and `longrope` choose their frequencies as they go
        cos, sin = make(self, position_ids, self.inv_freq.float())
        return (cos * self.attention_scaling).to(x.dtype), (sin * self.attention_scaling).to(x.dtype)

    return in_every_family("RotaryEmbedding", "forward", forward)


def frequencies(change: Callable[[Any, Tensor], Tensor]) -> Context:
    """Use `change(rotary, inv_freq_C)` for the inverse frequencies."""

    def make(rotary: Any, position_ids_BT: Tensor, inv_freq_C: Tensor) -> tuple[Tensor, Tensor]:
        angle = position_ids_BT[..., None].float() * change(rotary, inv_freq_C)
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos(), angle.sin()

    return tables(make)


def positions(change: Callable[[Tensor, Tensor], Tensor]) -> Context:
    """Give the decoder `change(position_ids_BT, document_ids_BT)` for its positions."""

    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        changed = change(kwargs["position_ids"], kwargs["document_ids"])
        return original(self, *args, **kwargs | {"position_ids": changed})

    return in_every_family("Model", "forward", forward)


@contextmanager
def documents(change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Build every attention plan from `change(document_ids_BT)`."""

    def wrong_plan(document_ids_BT: Tensor) -> Any:
        return make_plan(change(document_ids_BT.clone()))

    # The plug-in remembers a plan with its tensor, which may outlive this block.
    def forget(document_ids_BT: Tensor, query: Tensor) -> Any:
        return wrong_plan(document_ids_BT).to(query.device)

    with swap(make_plan, wrong_plan), swap(hf.remembered_plan, forget):
        yield


def attention(replacement: Around) -> Context:
    """Replace `attend`; `replacement(attend, q_BTHD, k_BTKD, v_BTKD, plan, *, engine, scale, ...)`."""
    return around(choice.attend, replacement)


def every_engine(attend: choice.Engine) -> Context:
    """Run `attend` in place of each engine."""
    return patch.dict(choice.ENGINES, dict.fromkeys(choice.ENGINES, attend))


def batches(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Context:
    """Train on `change(batch)` for every micro-batch, a dict of int64 [B, T]."""

    return around(make_micro_batch, lambda original, batch, *args: original(change(dict(batch)), *args))


def settings(**changes: Any) -> Context:
    """Make every strategy with these settings of `train` in place of its own."""

    def changed(init: Callable[..., None], self: Replicated, model: Any, train: Any, *args: Any) -> None:
        init(self, model, train.model_copy(update=changes), *args)

    return method(Replicated, "__init__", changed)


def rates(change: Callable[[Callable[[int, Any], float], int, Any], float]) -> Context:
    """Train with `change(learning_rate, step, train)` for the learning rate of a step."""

    return around(learning_rate, change)


def loaded_weights(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Context:
    """Load `change(state_dict)` into every module."""

    def load(original: Callable[..., Any], self: nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, change(dict(state_dict)), *args, **kwargs)

    return method(nn.Module, "load_state_dict", load)
