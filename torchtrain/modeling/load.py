"""From `model.source` to a model ready to train: found, checked against what the trainer relies on, never half right.

Legend: B batch · T tokens of a row · M model width · V vocabulary.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from anchorline import hub
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json
from torchtrain.config import ModelConfig
from torchtrain.modeling.smollm2 import smollm2_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# What transformers reads of a folder, besides weights and the tokenizer's own file; each holds one JSON object.
_SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "model.safetensors.index.json",
)
_OTHER_FILES = ("tokenizer.json", "tokenizer.model", "model.safetensors", "chat_template.jinja")
# Where a config leaves these, building or running the model would take for ever, or end in an overflow.
_SIZES = {
    "vocab_size": 2**24,
    "hidden_size": 2**20,
    "intermediate_size": 2**22,
    "num_hidden_layers": 2**10,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**12,
    "max_position_embeddings": 2**31,
}


def resolve_source(
    source: str,
    cache: str | Path,
    say: Callable[[str], None] = logger.info,
    *,
    weights: bool = True,
    trust_remote_code: bool = False,
) -> str:
    """Return a folder that transformers can load, every file of settings in it read once.

    Args:
        source: `model.source`: `smollm2`, a folder with a config.json, or a hub id.
        cache: where `smollm2` is converted to.
        say: takes the line that the conversion begins, or that the hub is asked.
        weights: whether they are needed, too: a hub's are then fetched.
        trust_remote_code: whether the model's own code is needed, too.

    Raises:
        UserError: none of the three, a damaged file; or `smollm2` cannot be made.
    """
    if source == "smollm2":
        return str(smollm2_folder(cache, say))
    wanted = (*hub.CONFIGS, *(hub.WEIGHTS if weights else ()), *(hub.CODE if trust_remote_code else ()))
    folder = hub.find_model(source, "model.source", wanted, say)
    for name in _SETTINGS:
        if (folder / name).exists():
            read_json(folder / name, f"model.source {quoted(source)}")
    for name in _OTHER_FILES:
        if (folder / name).exists() and not (folder / name).is_file():
            raise UserError(f"model.source {quoted(source)}: {quoted(folder / name)} is no regular file; replace it")
    if weights and not any(folder.glob("*.safetensors")):
        found = next((path.name for path in sorted(folder.glob("*.bin"))), None)
        instead = f"; {quoted(found)} may run code when it is read, so convert it to safetensors" if found else ""
        raise UserError(f"model.source {quoted(source)}: the folder holds no weights in *.safetensors{instead}")
    return str(folder)


@contextmanager
def read_by_library(source: str, what: str, trust_remote_code: bool = False) -> Iterator[None]:
    """Tell in one line whatever a library says of a user's files: what it raises of a damaged one can be anything.

    Only calls into a library may stand in the block.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else None  # it says so without a heading
        reason = _first_line(cause or error)
        if "trust_remote_code" in str(error) and not trust_remote_code:
            reason = "it needs code that comes with the model; read that, and if you trust it set model.trust_remote_code=true"
        elif isinstance(error, KeyError | AttributeError | TypeError | IndexError):
            reason = f"{type(error).__name__}: {reason}"  # whose text alone says little
        raise UserError(f"model.source {quoted(source)}: {what}: {reason}") from error
    except BaseException as error:  # tokenizers panics in Rust
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise UserError(f"model.source {quoted(source)}: {what}: {_first_line(error)}") from None


def open_config(source: str, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Read a model's config, without its weights.

    Args:
        source: what `resolve_source` returned.
        trust_remote_code: whether code of the model may run (`model.trust_remote_code`).

    Raises:
        UserError: it cannot be read, or it is not a causal language model's that transformers knows.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    with read_by_library(source, "its config.json is refused", trust_remote_code):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=True)
    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UserError(
            f"model.source {quoted(source)}: {quoted(config.model_type)} is no causal language model of transformers"
        )
    _check_sizes(source, config)
    return config


def _check_sizes(source: str, config: "PretrainedConfig") -> None:
    """Refuse sizes that no model has, which building it would not survive."""
    for name, most in _SIZES.items():
        size = getattr(config, name, None)
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= most:
            raise UserError(
                f"model.source {quoted(source)}: its config.json is refused: {name} {quoted(size)} is no whole number "
                f"from 1 to {most:,}"
            )


def open_tokenizer(source: str, trust_remote_code: bool = False) -> "PreTrainedTokenizerFast":
    """Read a model's tokenizer.

    Args:
        source: what `resolve_source` returned.
        trust_remote_code: whether code of the model may run (`model.trust_remote_code`).

    Raises:
        UserError: it cannot be read, or it is a slow one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with read_by_library(source, "no tokenizer", trust_remote_code):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        name = type(tokenizer).__name__
        raise UserError(f"model.source {quoted(source)}: {name} is a slow tokenizer; convert it to a tokenizer.json")
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
    from transformers import AutoModelForCausalLM

    from torchtrain.attention.hf import implementation_name, register
    from torchtrain.attention.separation import check_separation

    register()
    _check_weights(source)
    with read_by_library(source, "the model cannot be built", model.trust_remote_code):
        loaded: PreTrainedModel
        loaded, info = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]
            source,
            config=config,
            dtype=getattr(torch, model.dtype),
            attn_implementation=implementation_name(engine),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # and refused here: transformers names them only in a report that it logs
            trust_remote_code=model.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,  # a pickle may run code
        )
    if mismatched := sorted(info["mismatched_keys"]):
        name, found, expected = mismatched[0]
        raise UserError(
            f"model.source {quoted(source)}: {len(mismatched)} weights do not fit its config.json, the first is {name}: "
            f"{list(found)} in the file, {list(expected)} by the config"
        )
    if missing := sorted(info["missing_keys"]):
        raise UserError(f"model.source {quoted(source)}: {len(missing)} weights are missing, the first is {missing[0]}")
    if (name := first_not_finite(loaded.named_parameters())) is not None:
        raise UserError(
            f"model.source {quoted(source)}: {name} holds a number that is not finite in {model.dtype}; copy or download it again, or "
            "choose another model or model.dtype"
        )
    loaded = loaded.to(device)  # pyright: ignore[reportArgumentType]
    check_head(loaded)
    check_separation(loaded)
    if model.activation_checkpointing:
        # Renamed within the versions we support; both take the arguments of torch's checkpoint first.
        enable = getattr(loaded, "activation_checkpointing_enable", loaded.gradient_checkpointing_enable)
        enable({"use_reentrant": False})
    return loaded.train()


def _check_weights(source: str) -> None:
    """Open every file of weights, and hold the index against them.

    Raises:
        UserError: one is damaged, cut off, or named by the index and not there.
    """
    from safetensors import safe_open

    folder = Path(source)
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.exists():
        named = read_json(index, f"model.source {quoted(source)}").get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
            raise UserError(f"model.source {quoted(source)}: {quoted(index)} has no weight_map of tensors to files")
        names = sorted(set(named.values()))
        if stray := next((name for name in names if Path(name).name != name or not (folder / name).is_file()), None):
            raise UserError(f"model.source {quoted(source)}: {quoted(index)} names {quoted(stray)}, which is not there")
        files = [folder / name for name in names]
    for path in files:
        try:
            with safe_open(path, framework="pt"):
                pass
        except Exception as error:  # SafetensorError, or of the system
            raise UserError(
                f"model.source {quoted(source)}: {quoted(path.name)}: a safetensors file is damaged or cut off "
                f"({_first_line(error)}); copy or download it again"
            ) from None


@torch.no_grad()
def first_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    """Return the name of the first tensor that holds NaN or an infinity, or None. Reads each once, and copies nothing."""
    for name, x in tensors:
        if x.numel() and not all(map(math.isfinite, (bound.item() for bound in torch.aminmax(x)))):
            return name
    return None


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
    return quoted_reason(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))
