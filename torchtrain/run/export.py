"""Writes the model of a run as a Hugging Face folder."""

import errno
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import Tensor

from anchorline.errors import UserError, disk_fault
from anchorline.files import follow_umask
from torchtrain.config import Config
from torchtrain.data import anchor_ids
from torchtrain.modeling.adapters import FOLDER as ADAPTER
from torchtrain.modeling.adapters import save_adapter, split_off
from torchtrain.modeling.prompts import NotedAnchor, name_anchor
from torchtrain.modeling.save import reader_notes, save_folder
from torchtrain.modeling.smollm2 import SMOLLM2
from torchtrain.modeling.weights import first_not_finite
from torchtrain.run.folder import RunFolder
from torchtrain.run.setup import Setup

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

_SMOLLM2_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def export_step(
    folder: RunFolder,
    target: Path,
    setup: Setup,
    config: Config,
    step: int,
    weights: dict[str, Tensor] | None,
    safe: str,
) -> list[str]:
    """Write the model after a step into the folder `target` of a run, on rank 0; return what other readers need, a line
    each.

    weights: the state dict, where the model does not hold it whole.
    safe: which step is saved, for a message.
    Raises UserError: it cannot be written, or a weight is not finite. No file of it is left.
    """
    write_adapter: Callable[[Path], None] | None = None
    if weights is not None and (lora := config.model.lora) is not None:
        weights, adapter = split_off(setup.model, weights)
        write_adapter = partial(save_adapter, setup.model, lora, setup.source.base, adapter)
    if weights is not None and (name := first_not_finite(weights.items())) is not None:
        raise UserError(f"{name} is not finite after step {step}, so the model was not written to {target}")
    notes = reader_notes(setup.model.config)
    tokenizer, pack = setup.source.tokenizer, config.pack
    anchor = anchor_ids(tokenizer, pack) if pack.base_variant.has_anchor else []
    try:
        with folder.new_export(target) as made:
            noted = export(setup.model, tokenizer, made, weights, write_adapter, anchor)
            first = name_anchor(tokenizer, anchor)
            if noted is not None and noted.lacks:
                lacks = " and ".join(noted.lacks)
                notes += [f"every reader: begin {lacks} with {first}, which the tokenizer does not add by itself"]
            card = model_card(config, setup.model.config, step, notes, first, noted)
            (made / "README.md").write_text(card, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        why = disk_fault(error) if isinstance(error, OSError) else str(error)
        raise UserError(
            f"{target}: the model could not be written: {why}; {safe}; correct that, then: "
            f"torchtrain resume {folder.path}"
        ) from None
    return notes


def export(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    write_adapter: Callable[[Path], None] | None = None,
    anchor: Sequence[int] = (),
) -> NotedAnchor | None:
    """Write model and tokenizer into an empty folder that loads with plain transformers, 4 and 5, and with other
    readers.

    The config has the new length and the RoPE parameters, and not the attention engine of the training. The tokenizer
    gets the model's length as `model_max_length`.

    weights: the state dict, where the model does not hold it whole.
    write_adapter: writes an adapter into a folder, which is made in this one.
    anchor: the tokens that every prompt begins with.
    Returns as `save_folder`.
    Raises OSError: the folder cannot be written, or a library saved something else than a model with its config.
    """
    noted = save_folder(model, tokenizer, folder, weights, anchor)
    if not (folder / "config.json").is_file() or not list(folder.glob("model*.safetensors")):
        raise OSError(errno.EIO, "config.json or the weights are missing after they were saved", str(folder))
    if write_adapter is not None:
        write_adapter(folder / ADAPTER)
    follow_umask(folder)
    return noted


def model_card(
    config: Config,
    model_config: "PretrainedConfig",
    step: int,
    notes: Sequence[str],
    anchor: str = "",
    noted: NotedAnchor | None = None,
) -> str:
    """Return an exported model's README.md: its training, how to load it, how prompts begin, notes for readers."""
    pack, train = config.pack, config.train
    tokens = step * train.sequences_per_step * pack.sequence_length
    base = _SMOLLM2_ID if config.model.source == SMOLLM2 else config.model.source
    held = max(pack.sequence_length, getattr(model_config, "max_position_embeddings", 0))
    lines = [
        "---",
        *([] if Path(base).expanduser().exists() else [f"base_model: {json.dumps(base)}"]),
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags: [long-context, anchorline]",
        *([] if noted is None else [str(noted)]),
        "---",
        f"# A model for {held:,} tokens",
        "",
        f"Trained by Anchorline's `torchtrain` from `{base}`: {step:,} steps, {tokens:,} tokens, in rows of "
        f"{pack.sequence_length:,} (variant `{pack.variant}`), learning rate {train.learning_rate:g}.",
        f"RoPE: `{json.dumps(getattr(model_config, 'rope_parameters', None))}`.",
        "",
        "Load it with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.",
    ]
    if anchor:
        lines += ["", f"**Every prompt begins with {anchor}**: rows did, and every token sees it."]
    if notes:
        lines += ["", "Other readers need these settings:", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"
