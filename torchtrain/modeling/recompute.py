"""What of a model's activations is kept for the backward pass, as `model` of a config says."""

from typing import TYPE_CHECKING

from anchorline.errors import UserError
from torchtrain.config import ModelConfig, Recomputation
from torchtrain.modeling.chunks import chunk_layers
from torchtrain.modeling.kept_attention import checkpointing
from torchtrain.modeling.offload import HostMemory

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def save_memory(model: "PreTrainedModel", settings: ModelConfig, most: int | None = None) -> None:
    """Set up activation checkpointing, what it keeps and where, and chunks of layers. `auto` counts as true.

    Args:
        model: any causal language model.
        settings: `activation_checkpointing` and `layer_chunk` count.
        most: as `chunk_layers`.

    Raises:
        UserError: the model has layers that `model.layer_chunk` does not know, or that cannot be recomputed.
    """
    if settings.layer_chunk is not None:
        chunk_layers(model, settings.layer_chunk, most)
    if not settings.activation_checkpointing:
        return
    hand_layers_over(model, settings.recomputation)
    if settings.activation_checkpointing == "offload":
        host = HostMemory()
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = host.checkpoint  # pyright: ignore


def hand_layers_over(model: "PreTrainedModel", recomputation: Recomputation = True) -> None:
    """Let each layer hand its forward, while it trains, to torch's checkpoint, or to what is put in that place.

    Raises:
        UserError: transformers recomputes no layers of this model.
    """
    if not model.supports_gradient_checkpointing:
        raise UserError(
            f"model.activation_checkpointing: transformers recomputes no layers of {model.config.model_type}; set it "
            "to false, and model.fused to none"
        )
    # Renamed within the versions we support; both take the arguments of torch's checkpoint first.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(checkpointing(recomputation))
