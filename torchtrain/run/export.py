"""The trained model as an ordinary Hugging Face folder."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from anchorline.files import commit, follow_umask
from torchtrain.modeling.save import save_folder
from torchtrain.run.folder import is_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast


def export(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    partial: Path,
    target: Path,
    weights: dict[str, Tensor] | None = None,
    end: Callable[[Path, Path], None] = commit,
    write_adapter: Callable[[Path], None] | None = None,
) -> None:
    """Write model and tokenizer into `partial`, then `end(partial, target)`: by default flush and rename, so it is
    there whole or not at all.

    What is written loads with plain transformers, 4 and 5, and other readers: the config carries the new length and
    RoPE parameters, and says nothing of the attention engine the model was trained with.

    Args:
        model: saved as safetensors, in its dtype.
        tokenizer: saved with the model's length as `model_max_length`.
        partial: a folder beside the target, empty or not there yet.
        target: not there yet.
        weights: the state dict, where the model does not hold it whole.
        end: gives the folder its name.
        write_adapter: writes an adapter into the folder, as well.

    Raises:
        OSError: it cannot be written, or config.json or weights are not there when they should be.
    """
    partial.mkdir(exist_ok=True)
    save_folder(model, tokenizer, partial, weights)
    if not is_whole(partial):  # a library that saved something else in a model's place must not pass for a model
        raise OSError(errno.EIO, "config.json and weights are not all there after they were saved", str(partial))
    if write_adapter is not None:
        write_adapter(partial)
    follow_umask(partial)
    end(partial, target)
