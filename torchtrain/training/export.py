"""The trained model as an ordinary Hugging Face folder."""

from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from anchorline.files import commit
from torchtrain.modeling.save import save_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def export(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    partial: Path,
    target: Path,
    weights: dict[str, Tensor] | None = None,
) -> None:
    """Write model and tokenizer into `partial`, flush them to the disk, then rename it to `target`: it is there whole or not at all.

    What is written loads with plain transformers, 4 and 5, and other readers: the config carries the new length and RoPE
    parameters, and says nothing of the attention engine the model was trained with.

    Args:
        model: saved as safetensors, in its dtype.
        tokenizer: saved with the model's length as `model_max_length`.
        partial: a folder beside the target, not there yet.
        target: not there yet.
        weights: the state dict, where the model does not hold it whole.
    """
    save_folder(model, tokenizer, partial, weights)
    commit(partial, target)
