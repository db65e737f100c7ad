"""A model and its tokenizer as a Hugging Face folder that means the same to every reader, not to transformers 5 alone.

transformers 5 writes what only it can read: `rope_parameters` (4.x, and vLLM on it, take a theta of 10,000 and no
scaling, in silence), `dtype`, the tokenizer class `TokenizersBackend`, `extra_special_tokens` as a list. The names that
older readers know are added, which transformers 5 ignores. docs/exports.md is measured on what this writes.

Upstream: transformers 4.57.3 and 5.23, modeling_rope_utils.py; vLLM 0.11 to 0.33,
model_executor/layers/rotary_embedding, config/model.py and transformers_utils/config.py; llama.cpp, conversion/base.py.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from anchorline.files import replace_file
from torchtrain.modeling.prompts import NotedAnchor, put_anchor

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# transformers 4 keeps these outside of `rope_scaling`.
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
# Of llama.cpp's converters, those that write llama3's factors; the others leave that type out without a word.
_LLAMA3_IN_GGUF = ("llama", "mistral", "mixtral", "smollm3", "arcee", "exaone", "exaone4")
_LONGROPE_IN_GGUF = ("phi3", "phimoe", "minicpm", "minicpm3")


def save_folder(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast",
    folder: Path,
    weights: dict[str, Tensor] | None = None,
    anchor: Sequence[int] = (),
) -> NotedAnchor | None:
    """Write a model as safetensors in its dtype, and its tokenizer with the model's length as `model_max_length`.

    weights: the state dict, where the model does not hold it whole.
    anchor: the tokens that every prompt begins with; see `torchtrain.modeling.prompts.put_anchor`.
    Returns what the model card must note of the anchor; None without.
    Raises OSError: it cannot be written.
    """
    length: int | None = getattr(model.config, "max_position_embeddings", None)
    model.save_pretrained(folder, state_dict=weights)
    _rewrite(folder / "config.json", _add_older_names)
    if length is not None:
        _rewrite(folder / "generation_config.json", lambda written: _set_longest_generation(written, length))
        tokenizer.model_max_length = length
    noted = None
    if anchor:
        tokenizer, noted = put_anchor(tokenizer, anchor)
        if len(anchor) == 1:  # with which transformers begins where it is given no prompt
            _rewrite(folder / "generation_config.json", lambda written: written.update(bos_token_id=anchor[0]))
    tokenizer.backend_tokenizer.no_truncation()  # a length that tokenizer.json would cut texts at is the old one
    tokenizer.save_pretrained(folder)
    _rewrite(folder / "tokenizer_config.json", lambda written: _add_older_tokenizer(written, tokenizer))
    return noted


def reader_notes(config: "PretrainedConfig") -> list[str]:
    """Return notes for other readers on what no config.json can say: a line each, mostly none."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    length, name = config.max_position_embeddings, config.model_type
    if rope and "rope_type" not in rope:
        return [
            "transformers 4: takes one RoPE for all layers, and this model sets it per layer type; use transformers 5"
        ]
    kind, factor = rope.get("rope_type", "default"), rope.get("factor") or 1
    original = rope.get("original_max_position_embeddings") or length
    notes = []
    if name == "nemotron" and kind != "default":
        notes.append(f"transformers 4: leaves {kind} out of nemotron; use transformers 5")
    if kind == "dynamic":
        plain = json.dumps({"rope_parameters": {"rope_type": "default", "rope_theta": rope["rope_theta"]}})
        notes.append(
            f"vLLM: takes max_position_embeddings times the factor as its length; set --max-model-len {length}. Before "
            f"0.22 it scales at every length, too; as trained: --hf-overrides '{plain}' "
            """(on transformers 4: '{"rope_scaling": null}')"""
        )
    elif kind == "linear" and factor != 1:
        notes.append(
            f"vLLM: takes max_position_embeddings times the factor as its length; set --max-model-len {length}"
        )
    elif kind == "yarn" and original * factor != length:
        notes.append(f"vLLM before 0.30: takes {original} times the factor as its length; set --max-model-len {length}")
        notes.append(f"transformers 4.51: takes {length / original:g} for yarn's factor {factor:g}; use 4.57 or newer")
    given, weights = rope.get("attention_factor"), [rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0]
    if kind == "yarn" and (given is not None or all(weights)):
        scale = math.log(factor) if factor > 1 else 0.0
        if given is None:  # what transformers derives of the two
            given = (0.1 * weights[0] * scale + 1) / (0.1 * weights[1] * scale + 1)
        kept = "attention_factor" if rope.get("attention_factor") is not None else "mscale"
        relative = given / (0.1 * scale + 1)
        notes.append(
            f"vLLM before 0.30 and llama.cpp: leave yarn's {kept} out; "
            f'set "attn_factor": {relative:.9g} in rope_scaling, rope.scaling.attn_factor in the GGUF'
        )
    if kind == "longrope":
        notes.append(
            f"vLLM: serves the original {original} positions with the short factors; set --max-model-len {length}"
        )
        if (mscale := rope.get("attention_factor")) is not None or original * factor != length:
            mscale = _longrope_attention_factor(rope, length) if mscale is None else mscale
            notes.append(
                f'vLLM: set "short_mscale" and "long_mscale": {mscale:.9g} beside short_factor and long_factor'
            )
        if name not in _LONGROPE_IN_GGUF:
            notes.append(f"llama.cpp: its converter leaves longrope's factors out of {name}; do not use a GGUF of it")
    if kind == "llama3" and name not in _LLAMA3_IN_GGUF:
        notes.append(f"llama.cpp: its converter leaves llama3's scaling out of {name}; do not use a GGUF of it")
    return notes


def _rewrite(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    if file.is_file():  # a model that does not generate has no generation_config.json
        written = json.loads(file.read_text(encoding="utf-8"))
        change(written)
        replace_file(file, (json.dumps(written, indent=2, sort_keys=True) + "\n").encode())


def _add_older_names(written: dict[str, Any]) -> None:
    if "dtype" in written:
        written["torch_dtype"] = written["dtype"]
    rope: dict[str, Any] | None = written.get("rope_parameters")
    if not rope or "rope_type" not in rope:
        return
    if rope["rope_type"] == "longrope":
        length, original = written["max_position_embeddings"], rope["original_max_position_embeddings"]
        if rope.get("attention_factor") is None and rope.get("factor") not in (None, length / original):
            # transformers 4 derives it from the two lengths, whatever the factor is.
            rope["attention_factor"] = _longrope_attention_factor(rope, length)
        written["original_max_position_embeddings"] = original  # where it looks for the length
    scaling = {key: value for key, value in rope.items() if key not in _BESIDE_SCALING}
    if written["model_type"] == "phi3" and rope.get("attention_factor") is None and "short_factor" in rope:
        # The only three fields that transformers 4 takes for this family, which derives the rest, as 5 then does.
        scaling = {"type": "longrope"} | {key: rope[key] for key in ("short_factor", "long_factor")}
    written["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    written |= {key: rope[key] for key in _BESIDE_SCALING if key in rope}


def _longrope_attention_factor(rope: dict[str, Any], length: int) -> float:
    """Return what transformers derives where none is given (modeling_rope_utils.py), by the same operations."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or length / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _set_longest_generation(written: dict[str, Any], length: int) -> None:
    """Let a `max_length` of the source, which counts the prompt, not cut at the old length."""
    if written.get("max_length") is not None:
        written["max_length"] = length


def _add_older_tokenizer(written: dict[str, Any], tokenizer: "PreTrainedTokenizerFast") -> None:
    if written.get("tokenizer_class") == "TokenizersBackend":
        written["tokenizer_class"] = "PreTrainedTokenizerFast"  # an alias of it in transformers 5
    else:  # transformers 4's own classes (Llama, Gemma) put a BOS first unless told, whatever tokenizer.json says
        ids = tokenizer("a")["input_ids"]
        for end, name in ((ids[:1], "bos"), (ids[-1:], "eos")):  # of no ids where it does not know the text
            if (special := getattr(tokenizer, f"{name}_token_id")) is not None:
                written[f"add_{name}_token"] = end == [special]
    if isinstance(tokens := written.get("extra_special_tokens"), list):
        del written["extra_special_tokens"]  # a list is refused by transformers 4; 5 reads the older name too
        written["additional_special_tokens"] = tokens
