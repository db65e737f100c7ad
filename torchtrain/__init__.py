"""Anchorline's trainer: long-context training with AnchorAttention on Hugging Face models.

    import torchtrain

    model = torchtrain.attach(model)
    model(input_ids, position_ids=position_ids, document_ids=document_ids, use_cache=False)

Importing the package is cheap; torch and transformers are loaded by the first call that needs them.
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)

__version__ = "0.1.0"
__all__ = ["attach", "register"]


def attach(model: "Model", engine: str = "auto") -> "Model":
    """Set Anchorline's attention on a model and check every layer; see `torchtrain.attention.attach.attach`."""
    from torchtrain.attention.attach import attach as attach_checked

    return attach_checked(model, engine)


def register() -> None:
    """Register Anchorline's attention with transformers; see `torchtrain.attention.hf.register`."""
    from torchtrain.attention.hf import register as register_with_transformers

    register_with_transformers()
