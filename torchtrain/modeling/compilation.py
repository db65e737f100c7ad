"""`model.fused: compile`: torch.compile makes few kernels of what a decoder layer does element by element.

Each layer is compiled by itself, for the one shape of a run's rows, inside its recomputation. The graph breaks at
attention alone (`torchtrain.attention.hf`), so documents may differ in every step. In evaluation mode nothing is
compiled. Inductor computes in float32 between two roundings: in bfloat16 it rounds less often than the model does.

Upstream: transformers/modeling_layers.py (GradientCheckpointingLayer), which hands a layer's forward, while it trains,
to `_gradient_checkpointing_func`: that is compiled. `Module.compile` would take the recomputation into the graph, where
it breaks at attention and leaves the whole layer as it was, in silence.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from anchorline.errors import UserError
from torchtrain.config import Recomputation
from torchtrain.modeling.recompute import checkpointing
from torchtrain.modeling.source import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_HANDS_OVER = "_gradient_checkpointing_func"


def check_compiler(device: torch.device) -> None:
    """Find a missing or broken compiler before anything is loaded. Raises UserError: torch cannot compile here."""
    try:
        torch.compile(lambda x: x + 1, dynamic=False)(torch.ones(64, device=device))
    except Exception as error:  # of Inductor, of the compiler that it calls, of Triton
        needed = "Triton and a C compiler" if device.type == "cuda" else "a C++ compiler such as g++"
        raise UserError(
            f"model.fused compile: torch cannot compile for {device.type} here ({first_line(error)}); install "
            f"{needed}, or set model.fused to none"
        ) from None


def compile_layers(model: "PreTrainedModel", recomputation: Recomputation) -> None:
    """Let decoder layers, set up for recomputation, run compiled while training. Raises UserError: it has none."""
    layers = layers_of(model)
    if not layers:
        raise UserError(
            f"model.fused compile: {model.config.model_type} has no decoder layers that can be compiled one by one; "
            "set model.fused to none"
        )
    how = checkpointing(recomputation)
    run = functools.partial(checkpoint, _run, **how) if recomputation else _run
    for module in layers:
        setattr(module, _HANDS_OVER, run)
    _expect(len(layers))


def is_compiled(model: nn.Module) -> bool:
    """Whether `compile_layers` was called with this model."""
    handed = (getattr(module, _HANDS_OVER) for module in layers_of(model))
    return any(run is _run or getattr(run, "args", None) == (_run,) for run in handed)


def has_layers(model: nn.Module) -> bool:
    """Whether a model has decoder layers that can be compiled one by one, before it hands them over."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())
    return layers and getattr(model, "supports_gradient_checkpointing", False)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model that can be compiled one by one."""
    return [module for module in model.modules() if hasattr(module, _HANDS_OVER)]


def _expect(layers: int) -> None:
    """Let torch compile each layer by itself, and fail beyond that: else it would go on without compiling."""
    from torch._dynamo import config

    torch.compiler.reset()  # what an earlier model of this process had compiled counts, too
    config.nested_graph_breaks = True  # one graph before attention and one after it, not more around each caller
    config.recompile_limit = max(config.recompile_limit, 2 * layers)
    config.fail_on_recompile_limit_hit = True


def _run(forward: Callable[..., Any], *args: Any) -> Any:
    """Run a layer's forward compiled: a method, or a partial of one or of its plain function."""
    keywords: dict[str, Any] = {}
    if isinstance(forward, functools.partial):
        forward, args, keywords = forward.func, (*forward.args, *args), forward.keywords
    if (layer := getattr(forward, "__self__", None)) is not None:
        forward, args = forward.__func__, (layer, *args)  # type: ignore[attr-defined]
    return _compile(forward)(*args, **keywords)


@functools.cache
def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function that all layers of a kind share, so that it is compiled once for all of them."""
    return torch.compile(function, dynamic=False)
