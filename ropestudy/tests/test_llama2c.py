"""A checkpoint of llama2.c against the same decoder's own parameters, its tokenizer, and damaged files."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from anchorline.errors import UserError
from jaxref.decoder_config import DecoderConfig
from jaxref.weights import from_arrays, load_hf, to_arrays
from ropestudy.llama2c import PIECES_FROM, convert, read_llama2c

WIDTH, INNER, LAYERS, HEADS, KV_HEADS, POSITIONS = 8, 12, 2, 2, 1, 16
HEAD = WIDTH // HEADS
PIECES = {" a": 5.0, " ab": 4.0, "b": 1.0, " ": 0.5, "a": 0.2, "ab": 3.0}
VOCABULARY = PIECES_FROM + len(PIECES)
RANDOM = np.random.default_rng(0)


def neighbours(array: np.ndarray) -> np.ndarray:
    """Rows half a head apart as llama2.c has them, side by side: in a loop."""
    out = np.empty_like(array)
    for head in range(len(array) // HEAD):
        for pair in range(HEAD // 2):
            for side in range(2):
                out[head * HEAD + 2 * pair + side] = array[head * HEAD + side * HEAD // 2 + pair]
    return out


def written(tied: bool = True) -> tuple[bytes, dict[str, np.ndarray]]:
    """A checkpoint as llama2.c's export.py writes version 0, and the parameters by Hugging Face's names."""
    shapes = {
        "input_layernorm": (WIDTH,), "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
        "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
        "post_attention_layernorm": (WIDTH,), "mlp.gate_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
        "mlp.up_proj": (INNER, WIDTH),
    }  # fmt: skip

    def draw(*shape: int) -> np.ndarray:
        return RANDOM.normal(size=shape).astype("<f4")

    arrays = {"model.embed_tokens.weight": draw(VOCABULARY, WIDTH)}
    parts = [arrays["model.embed_tokens.weight"]]
    for name, shape in shapes.items():
        for layer in range(LAYERS):
            array = arrays[f"model.layers.{layer}.{name}.weight"] = draw(*shape)
            parts.append(neighbours(array) if name.endswith(("q_proj", "k_proj")) else array)
    arrays["model.norm.weight"] = draw(WIDTH)
    parts += [arrays["model.norm.weight"], draw(2, POSITIONS, HEAD // 2)]
    if not tied:
        arrays["lm_head.weight"] = draw(VOCABULARY, WIDTH)
        parts.append(arrays["lm_head.weight"])
    header = (WIDTH, INNER, LAYERS, HEADS, KV_HEADS, VOCABULARY if tied else -VOCABULARY, POSITIONS)
    tokens = [(b"x", 0.0)] * PIECES_FROM + [(piece.encode(), score) for piece, score in PIECES.items()]
    tokenizer = struct.pack("<i", 3) + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in tokens)
    return struct.pack("<7i", *header) + b"".join(part.tobytes() for part in parts) + tokenizer, arrays


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_read_to_its_name(tmp_path: Path, tied: bool):
    content, arrays = written(tied)
    (tmp_path / "m.data").write_bytes(content)
    config, found, tokenizer = read_llama2c(tmp_path / "m.data")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    from_arrays(DecoderConfig.from_hf(config), found)  # refuses names and shapes that do not fit
    assert (config["tie_word_embeddings"], config["max_position_embeddings"]) == (tied, POSITIONS)
    assert tokenizer.encode("ab", add_special_tokens=False).tokens == [" ab"]
    assert tokenizer.encode("b\n", add_special_tokens=False).tokens == [" ", "b", "<0x0A>"]
    assert tokenizer.decode(tokenizer.encode("ab ☃").ids) == " ab ☃"


@pytest.mark.parametrize("cut", [0, 20, 28, 1000, -1])
def test_a_file_that_is_cut_short_is_refused_in_one_line(tmp_path: Path, cut: int):
    (tmp_path / "m.data").write_bytes(written()[0][:cut])
    with pytest.raises(ValueError, match=r"is not a checkpoint of llama2\.c with its tokenizer behind it") as refused:
        read_llama2c(tmp_path / "m.data")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("place", "value"), [(0, -8), (0, 7), (3, 0), (4, 3), (5, 0), (6, 2**30)])
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, place: int, value: int):
    content = bytearray(written()[0])
    struct.pack_into("<i", content, 4 * place, value)
    (tmp_path / "m.data").write_bytes(bytes(content))
    with pytest.raises(ValueError, match="its header says"):
        read_llama2c(tmp_path / "m.data")


def test_a_checkpoint_becomes_a_folder_of_hugging_face(tmp_path: Path):
    content, arrays = written()
    (tmp_path / "m.data").write_bytes(content)
    convert(tmp_path / "m.data", tmp_path / "made")
    config, decoder = load_hf(tmp_path / "made")
    assert config == DecoderConfig.from_hf(read_llama2c(tmp_path / "m.data")[0])
    for name, array in to_arrays(decoder).items():
        np.testing.assert_array_equal(array, arrays[name], err_msg=name)
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    said = json.loads((tmp_path / "made" / "tokenizer_config.json").read_text())
    assert [tokenizer.token_to_id(said[f"{name}_token"]) for name in ("unk", "bos", "eos")] == [0, 1, 2]
    assert tokenizer.decode(tokenizer.encode("ab ☃").ids) == " ab ☃"
    with pytest.raises(UserError, match="exists"):
        convert(tmp_path / "m.data", tmp_path / "made")
    (tmp_path / "cut.data").write_bytes(content[:-1])
    with pytest.raises(UserError, match="is not a checkpoint of llama2"):
        convert(tmp_path / "cut.data", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.data", "m.data", "made"]
