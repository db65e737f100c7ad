"""Turns `model.source` into a folder, and opens its config and tokenizer, without weights.

Whatever a folder holds, a library's error about it reaches the user as one line (`read_by_library`).
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from anchorline import hub
from anchorline.errors import UserError, quoted, quoted_reason
from anchorline.files import read_json
from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import find_fault, too_long
from torchtrain.modeling.smollm2 import SMOLLM2, smollm2_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

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
_ADAPTER = "adapter_config.json"  # PEFT's; transformers looks for it in every model's folder
# Ends of the files that a tokenizer is made from.
_TOKENIZERS = (".model", ".tiktoken", "vocab.json", "vocab.txt", "tekken.json")
_MOST_TOKENIZER_BYTES = 1 << 28
_OTHER_FILES = ("tokenizer.json", "tokenizer.model", "model.safetensors", "chat_template.jinja")
# The shapes of the paper's models and of the demo's, for planning without a hub or a conversion: index.json has how
# many weights each has, a folder of its id the config.json published there, without dtype and versions. They are typed
# in, not fetched: a test holds the number of weights.
_OF_ROPE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # beside RoPE's tables
_TABLES = ("rope_scaling", "rope_parameters")
PUBLISHED = Path(__file__).parent / "published"
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
    log: Callable[[str], None] = logger.info,
    *,
    needs: Literal["config", "tokenizer", "weights"] = "weights",
    trust_remote_code: bool = False,
) -> str:
    """Return a folder that transformers can load, every file of settings in it read once.

    source: `model.source`: `smollm2`, a folder with a config.json, or a hub id.
    cache: where `smollm2` is converted to.
    log: takes the line that the conversion begins, or that the hub is asked.
    needs: what is opened of it; of a hub only that is fetched. For the config alone the shapes that come with this
        package stand for the hub's and for `smollm2`'s: they have neither tokenizer nor weights.
    trust_remote_code: whether the model's own code is needed, too.
    Raises UserError: none of the three, a damaged file, an adapter beside a model; or `smollm2` cannot be made.
    """
    weights = needs == "weights"
    if needs == "config" and (shapes := find_published(source)) is not None:
        return str(shapes)
    if source == SMOLLM2:
        return str(smollm2_folder(cache, log))
    wanted = (*hub.CONFIGS, *(hub.WEIGHTS if weights else ()), *(hub.CODE if trust_remote_code else ()))
    folder = hub.find_model(source, "model.source", wanted, log)
    for name in _SETTINGS:
        if (folder / name).exists():
            read_json(folder / name, f"model.source {quoted(source)}")
    for name in _OTHER_FILES:
        if (folder / name).exists() and not (folder / name).is_file():
            raise UserError(f"model.source {quoted(source)}: {quoted(folder / name)} is not a regular file; replace it")
    if weights and not any(folder.glob("*.safetensors")):
        found = next((path.name for path in sorted(folder.glob("*.bin"))), None)
        instead = f"; {quoted(found)} may run code when it is read, so convert it to safetensors" if found else ""
        raise UserError(f"model.source {quoted(source)}: the folder holds no weights in *.safetensors{instead}")
    if weights:
        check_no_adapter(source, folder)
    return str(folder)


def check_source(source: str, field: str = "model.source") -> None:
    """Refuse, without a hub or torch's imports, what `resolve_source` refuses. `field` opens messages."""
    here = os.path.exists(os.path.expanduser(source))
    if source != SMOLLM2 and (here or not hub.is_id(source) or hub.find_cached(source, hub.CONFIGS) is None):
        try:
            folder = resolve_source(source, "", needs="weights" if here else "tokenizer")
            _explain_tokenizer(folder)
            fault = _find_no_number(read_json(Path(folder) / "config.json", f"model.source {quoted(source)}"))
            if fault is not None:
                raise UserError(f"model.source {quoted(source)}: its config.json has {fault}; correct it there")
        except UserError as error:
            raise UserError(str(error).replace("model.source", field, 1)) from None


def check_kept_length(source: str, rope: RopeConfig, length: int) -> None:
    """Refuse a `length` (`pack.sequence_length`) that the `rope` section does nothing for, by the model's config.json
    alone. Raises UserError: the model holds less, and RoPE is kept. What more there is to check, `extend` does.
    """
    file = Path(source).expanduser() / "config.json"
    if rope != RopeConfig() or not file.is_file():
        return
    written = read_json(file, f"model.source {quoted(source)}")
    held, tables = written.get("max_position_embeddings"), [written.get(name) for name in _TABLES]
    linear = any("linear" in (table.get("rope_type"), table.get("type")) for table in tables if table)
    if isinstance(held, int) and length > held and (any(tables) or written.get("rope_theta")) and not linear:
        raise too_long(length, held)


def check_no_adapter(source: str, folder: str | Path) -> None:
    """Refuse an adapter beside a model: transformers would take it unasked. Raises UserError: there is one."""
    if os.path.lexists(Path(folder) / _ADAPTER):
        raise UserError(
            f"model.source {quoted(source)}: {quoted(str(folder))} holds an adapter beside a model; merge it into the "
            f"model, or move {_ADAPTER} away (of a model from a hub, in a copy of the folder)"
        )


def find_published(source: str) -> Path | None:
    """Return the folder of a published model's config.json by hub id; None where a folder has that name."""
    if source not in published_models():
        return None
    if source != SMOLLM2 and os.path.lexists(os.path.join(source, "config.json")):
        return None
    return PUBLISHED / source


def published_models() -> dict[str, int]:
    """Return the models whose shapes come with this package: by id, how many weights each has."""
    return read_json(PUBLISHED / "index.json", "torchtrain/modeling/published")


@contextmanager
def read_by_library(source: str, what: str, trust_remote_code: bool = False) -> Iterator[None]:
    """Make one line of what a library raises of a user's files. Only calls into a library may stand in the block."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, StrictDataclassError) else None  # it says so without a heading
        reason = first_line(cause or error)
        if "trust_remote_code" in str(error) and not trust_remote_code:
            reason = (
                "it needs code that comes with the model; read that, and if you trust it set "
                "model.trust_remote_code=true"
            )
        elif isinstance(error, KeyError | AttributeError | TypeError | IndexError):
            reason = f"{type(error).__name__}: {reason}"  # whose text alone says little
        raise UserError(f"model.source {quoted(source)}: {what}: {reason}") from error
    except BaseException as error:  # tokenizers panics in Rust
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise UserError(f"model.source {quoted(source)}: {what}: {first_line(error)}") from None


def open_config(source: str, trust_remote_code: bool = False) -> "PretrainedConfig":
    """Read a resolved model's config alone. Raises UserError: it cannot be read, or is no known causal model's."""
    import torch
    from transformers import AutoConfig, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if (written := Path(source) / "config.json").is_file():
        fault = _find_no_number(read_json(written, f"model.source {quoted(source)}"))
        if fault is not None:
            raise UserError(f"model.source {quoted(source)}: its config.json has {fault}; correct it there")
    with read_by_library(source, "its config.json is refused", trust_remote_code):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, local_files_only=True)
        if not isinstance(dtype := config.dtype, torch.dtype | None):
            raise ValueError(f"dtype {quoted(dtype)} is not the name of one of torch's")
        type(config).from_dict(config.to_dict())  # as it is read back, and saved, later on
    if (Path(source) / "generation_config.json").is_file():
        with read_by_library(source, "its generation_config.json is refused"):
            GenerationConfig.from_pretrained(source, local_files_only=True)
    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not own_code:
        raise UserError(
            f"model.source {quoted(source)}: {quoted(config.model_type)} is not a causal language model of transformers"
        )
    _check_sizes(source, config)
    return config


def check_config(config: "PretrainedConfig", length: int) -> None:
    """Refuse no fixed number of positions, attention dropout, or a chunk shorter than the rows. Raises UserError."""
    if getattr(config, "max_position_embeddings", None) is None:
        raise UserError(
            f"model.source: {config.model_type} names no max_position_embeddings in its config.json and is not "
            "supported"
        )
    if dropout := getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"model.source: attention_dropout {dropout} in its config.json is not supported; set it to 0 in a local "
            "copy"
        )
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < length and "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise UserError(
            f"model.source: its attention_chunk_size of {chunk} tokens is shorter than pack.sequence_length {length} "
            "and is not supported; shorten the rows or choose a model without one"
        )


def _find_no_number(written: dict[str, Any]) -> str | None:
    """Return, in words, the first value of a config.json that is no number where it must be one."""
    tables: dict[str, Any] = {"": {name: written[name] for name in _OF_ROPE if written.get(name) is not None}}
    for name in _TABLES:
        if (table := written.get(name)) is not None:
            if not isinstance(table, dict):
                return f"{name} {quoted(table)}, which is not a table"
            tables[f"{name}."] = table
            tables |= {f"{name}.{kind}.": x for kind, x in table.items() if isinstance(x, dict)}
    faults = (f"{path}{fault}" for path, table in tables.items() if (fault := find_fault(table)) is not None)
    return next(faults, None) or _find_not_finite(written, "")


def _find_not_finite(tree: Any, path: str) -> str | None:
    if isinstance(tree, float) and not math.isfinite(tree) and not (path.startswith("time_step") and tree > 0):
        return f"{path} {tree}, which is not a number"  # Mamba 2 has an infinite limit
    if isinstance(tree, dict):
        inner = ((f"{path}.{name}" if path else name, value) for name, value in tree.items())
    else:
        inner = ((path, value) for value in (tree if isinstance(tree, list) else ()))
    return next((fault for name, value in inner if (fault := _find_not_finite(value, name)) is not None), None)


def _check_sizes(source: str, config: "PretrainedConfig") -> None:
    """Refuse sizes that no model has, which building it would not survive."""
    for name, most in _SIZES.items():
        size = getattr(config, name, None)
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= most:
            raise UserError(
                f"model.source {quoted(source)}: its config.json is refused: {name} {quoted(size)} is not a whole "
                f"number from 1 to {most:,}"
            )


def open_tokenizer(source: str, trust_remote_code: bool = False) -> "PreTrainedTokenizerFast":
    """Read a resolved model's tokenizer. Raises UserError: it cannot be read, or it is a slow one."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        with read_by_library(source, "no tokenizer", trust_remote_code):
            tokenizer = AutoTokenizer.from_pretrained(
                source, trust_remote_code=trust_remote_code, local_files_only=True
            )
    except UserError:
        _explain_tokenizer(source)
        raise
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        name = type(tokenizer).__name__
        raise UserError(f"model.source {quoted(source)}: {name} is a slow tokenizer; convert it to a tokenizer.json")
    return tokenizer


def _explain_tokenizer(source: str) -> None:
    """Say it better than the library, where a folder holds no tokenizer, or one that is no JSON."""
    folder = Path(source)
    whole = folder / "tokenizer.json"
    if whole.is_file():
        read_json(whole, f"model.source {quoted(source)}", most=_MOST_TOKENIZER_BYTES)
    elif folder.is_dir() and not any(path.name.endswith(_TOKENIZERS) for path in folder.iterdir()):
        raise UserError(
            f"model.source {quoted(source)}: the folder holds no tokenizer; put the model's tokenizer.json there"
        )


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says, quoted."""
    return quoted_reason(next((line for line in str(error).splitlines() if line.strip()), type(error).__name__))
