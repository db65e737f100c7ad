"""From `model.source` to a model ready to train: found, checked against what the trainer relies on, never half right.

Legend: B batch · T tokens of a row · M model width · V vocabulary.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anchorline.errors import UserError
from torchtrain.config import ModelConfig
from torchtrain.modeling.smollm2 import smollm2_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_source(source: str, cache: str | Path, say: Callable[[str], None] = logger.info) -> str:
    """Return a folder or a hub id that transformers can load.

    Args:
        source: `model.source`: `smollm2`, a folder with a config.json, or a hub id.
        cache: where `smollm2` is converted to.
        say: takes the line that the conversion begins.

    Raises:
        UserError: none of the three; or `smollm2` cannot be made.
    """
    if source == "smollm2":
        return str(smollm2_folder(cache, say))
    folder = Path(source).expanduser()
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.exists() or not _HUB_ID.fullmatch(source):
        raise UserError(f"model.source {source!r}: no folder with a config.json, and no hub id such as name/model")
    return source


def open_config(source: str) -> "PretrainedConfig":
    """Read a model's config, without its weights.

    Raises:
        UserError: it cannot be read, or it is not a causal language model's that transformers knows.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        config = AutoConfig.from_pretrained(source)
    except OSError as error:
        raise UserError(
            f"model.source {source!r}: no folder and no id that can be reached: {_first_line(error)}"
        ) from None
    except (ValueError, KeyError, StrictDataclassError) as error:
        reason = _first_line(error.__cause__ or error)  # the cause says it without a heading
        raise UserError(f"model.source {source!r}: its config.json is refused: {reason}") from None
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(f"model.source {source!r}: {config.model_type} is no causal language model of transformers")
    return config


def open_tokenizer(source: str) -> "PreTrainedTokenizerFast":
    """Read a model's tokenizer.

    Raises:
        UserError: it cannot be read, or it is a slow one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise UserError(f"model.source {source!r}: no tokenizer: {_first_line(error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        name = type(tokenizer).__name__
        raise UserError(f"model.source {source!r}: {name} is a slow tokenizer; convert it to a tokenizer.json")
    return tokenizer


def check_config(config: "PretrainedConfig", length: int) -> None:
    """Refuse what the attention engines do not honour, before any weight is read.

    Raises:
        UserError: no fixed number of positions, attention dropout, or a window or chunk of attention shorter than the rows.
    """
    if getattr(config, "max_position_embeddings", None) is None:
        raise UserError(
            f"model.source: {config.model_type} names no max_position_embeddings in its config.json and is not supported"
        )
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"model.source: attention_dropout {dropout} in its config.json is not supported; set it to 0 in a local copy"
        )
    from torchtrain.attention.masks import MASKED_LAYER_TYPES

    for what, setting in MASKED_LAYER_TYPES.items():
        reach = getattr(config, setting, None)
        is_used = what in (getattr(config, "layer_types", None) or [what])
        if reach is not None and is_used and reach < length:
            raise UserError(
                f"model.source: its {setting} of {reach} tokens is shorter than pack.sequence_length {length} and is not "
                "supported; shorten the rows or choose a model without one"
            )


def load_model(
    source: str, config: "PretrainedConfig", model: ModelConfig, engine: str, device: torch.device
) -> "PreTrainedModel":
    """Load the weights into a model with this config and this attention engine, on the device, in training mode.

    The model is built in its dtype. Converting it afterwards would round RoPE's float32 inverse frequencies too.

    Args:
        source: what `resolve_source` returned.
        config: what `torchtrain.modeling.rope.extend` returned.
        model: dtype and activation checkpointing.
        engine: what `torchtrain.attention.resolve_engine` returned.
        device: where to.

    Raises:
        UserError: weights missing, cut off or of another shape, attention that cannot be replaced, or a check below that
            fails.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    from torchtrain.attention.hf import implementation_name, register
    from torchtrain.attention.separation import check_separation

    register()
    try:
        loaded: PreTrainedModel
        loaded, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            source,
            config=config,
            dtype=getattr(torch, model.dtype),
            attn_implementation=implementation_name(engine),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # and refused here: transformers names them only in a report that it logs
        )
    except SafetensorError as error:
        raise UserError(
            f"model.source {source!r}: a safetensors file is damaged or cut off ({error}); copy or download it again"
        ) from None
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model.source {source!r}: {_first_line(error)}") from None
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise UserError(
            f"model.source {source!r}: {len(mismatched)} weights do not fit its config.json, the first is {name}: "
            f"{list(found)} in the file, {list(expected)} by the config"
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model.source {source!r}: {len(missing)} weights are missing, the first is {missing[0]}")
    loaded = loaded.to(device)  # pyright: ignore[reportArgumentType]
    check_head(loaded)
    check_separation(loaded)
    if model.activation_checkpointing:
        # Renamed within the versions we support; both take the arguments of torch's checkpoint first.
        enable = getattr(loaded, "activation_checkpointing_enable", loaded.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return loaded.train()


def hidden_states(model: "PreTrainedModel", batch: dict[str, Tensor], plan: Any = None) -> Tensor:
    """Run the model without its head: [B, T, M], under the batch's documents and positions."""
    return model.base_model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        document_ids=batch["document_ids"],
        plan=plan,
        use_cache=False,
    ).last_hidden_state


def head_of(model: "PreTrainedModel") -> nn.Module:
    """Return the module that makes logits [.., V] of hidden states [.., M]."""
    head = model.get_output_embeddings()
    assert head is not None, "a causal language model has a head"
    return head


@torch.no_grad()
def check_head(model: "PreTrainedModel") -> None:
    """Check that logits are head(hidden states) and nothing more, which the chunked loss relies on.

    Raises:
        UserError: the model does more (scales or caps its logits, as Gemma 2 and Cohere do).
    """
    batch = _tiny_batch(model)
    model.eval()
    logits_BTV = model(**batch, use_cache=False).logits
    own_BTV = head_of(model)(hidden_states(model, batch))
    if not torch.equal(own_BTV.float(), logits_BTV.float()):
        raise UserError(
            f"model.source: {model.config.model_type} does more than one linear layer to make logits (scales or caps them), "
            "which the chunked loss does not support"
        )


def _tiny_batch(model: "PreTrainedModel") -> dict[str, Tensor]:
    """Make one row of two documents of four tokens, no anchor."""
    tokens = torch.arange(8, device=model.device)[None]
    return {"input_ids": tokens + 1, "position_ids": tokens, "document_ids": tokens // 4 + 1}


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
