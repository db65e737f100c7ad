"""Round trips are bit for bit, and what does not fit is named."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxref.decoder_config import DecoderConfig
from jaxref.model import to_arrays
from jaxref.storage.weights import cast, from_arrays, load_hf, parameter_shapes, save_hf
from jaxref.tests.decoders import FAMILIES, hf_config, random_arrays, tiny

DTYPES = [np.float64, np.float32, ml_dtypes.bfloat16, np.float16]


def assert_bitwise(left, right) -> None:
    assert left.keys() == right.keys()
    for name in left:
        a, b = np.asarray(left[name]), np.asarray(right[name])
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), name


def write_hf(folder, fields, arrays) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(arrays, folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_are_transformers_names(family):
    shapes = parameter_shapes(DecoderConfig.from_hf(hf_config(family, num_hidden_layers=1)))
    expected = {
        "model.embed_tokens.weight": (29, 12),
        "model.layers.0.input_layernorm.weight": (12,),
        "model.layers.0.self_attn.q_proj.weight": (24, 12),
        "model.layers.0.self_attn.k_proj.weight": (12, 12),
        "model.layers.0.self_attn.v_proj.weight": (12, 12),
        "model.layers.0.self_attn.o_proj.weight": (12, 24),
        "model.layers.0.post_attention_layernorm.weight": (12,),
        "model.layers.0.mlp.gate_proj.weight": (20, 12),
        "model.layers.0.mlp.up_proj.weight": (20, 12),
        "model.layers.0.mlp.down_proj.weight": (12, 20),
        "model.norm.weight": (12,),
        "lm_head.weight": (29, 12),
    }
    if family == "qwen2":
        expected |= {f"model.layers.0.self_attn.{n}_proj.bias": (24 if n == "q" else 12,) for n in "qkv"}
    if family == "qwen3":
        expected |= {f"model.layers.0.self_attn.{n}_norm.weight": (6,) for n in "qk"}
    assert shapes == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_through_decoder_and_folder_keep_every_bit(dtype, tmp_path):
    config = DecoderConfig.from_hf(hf_config("qwen3", tie_word_embeddings=True))
    arrays = random_arrays(config, dtype)
    save_hf(tmp_path / "model", from_arrays(config, arrays))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]
    loaded_config, loaded = load_hf(tmp_path / "model")
    assert loaded_config == config
    assert_bitwise(to_arrays(loaded), arrays)


def test_eleven_layers_stay_in_order():
    """Paths sorted as text would put layer 10 before layer 2."""
    config = DecoderConfig.from_hf(hf_config("llama", num_hidden_layers=11))
    arrays = random_arrays(config)
    decoder = from_arrays(config, arrays)
    for i in range(11):
        stored = np.asarray(decoder.layers[i].mlp.up_proj.weight[...])
        np.testing.assert_array_equal(stored, arrays[f"model.layers.{i}.mlp.up_proj.weight"])
    assert_bitwise(to_arrays(decoder), arrays)


def test_shards_and_old_rotary_buffers_are_read(tmp_path):
    fields = hf_config("llama")
    arrays = random_arrays(DecoderConfig.from_hf(fields))
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)}
    names = sorted(arrays)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: arrays[name] for name in held} | (buffers if file[0] == "a" else {}), tmp_path / file)
    places = {name: file for file, held in shards.items() for name in held} | dict.fromkeys(buffers, "a.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_bitwise(to_arrays(load_hf(tmp_path)[1]), arrays)


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    fields = hf_config("qwen2", tie_word_embeddings=True)
    arrays = random_arrays(DecoderConfig.from_hf(fields))
    head = arrays["model.embed_tokens.weight"].copy()
    write_hf(tmp_path / "same", fields, arrays | {"lm_head.weight": head})
    assert_bitwise(to_arrays(load_hf(tmp_path / "same")[1]), arrays)
    head[0, 0] += 1
    write_hf(tmp_path / "other", fields, arrays | {"lm_head.weight": head})
    with pytest.raises(ValueError, match=r"tie_word_embeddings: true, but lm_head.weight differs"):
        load_hf(tmp_path / "other")


def test_what_does_not_fit_is_named(tmp_path):
    fields = hf_config("llama")
    config = DecoderConfig.from_hf(fields)
    arrays = random_arrays(config)
    norm = arrays.pop("model.norm.weight")
    cases = {
        "weights: missing model.norm.weight$": {},
        "weights: unexpected model.norm.bias$": {"model.norm.weight": norm, "model.norm.bias": norm},
        r"model.norm.weight: shape \(11,\) is not the \(12,\) of the config": {"model.norm.weight": norm[1:]},
        "model.norm.weight: dtype (int8|I8) is not one of": {"model.norm.weight": norm.astype(np.int8)},
    }
    for number, (message, changes) in enumerate(cases.items()):
        with pytest.raises(ValueError, match=message):
            from_arrays(config, arrays | changes)
        write_hf(tmp_path / str(number), fields, arrays | changes)
        with pytest.raises(ValueError, match=message):
            load_hf(tmp_path / str(number))
    with pytest.raises(ValueError, match=r"weights: missing lm_head.weight, .* and 16 more$"):
        from_arrays(config, {})


def test_an_existing_folder_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match=r"folder: .* exists; give a new one"):
        save_hf(tmp_path, tiny("llama"))


def test_cast_rounds_once():
    """1 + 2^-8 + 2^-30 lies above the middle of two bfloat16s; through float32 it would lie on it and go to the even
    one.
    """
    config = DecoderConfig.from_hf(hf_config("llama"))
    arrays = random_arrays(config, np.float64) | {"model.norm.weight": np.full(12, 1 + 2.0**-8 + 2.0**-30)}
    coarse = to_arrays(cast(from_arrays(config, arrays), "bfloat16"))
    assert {str(array.dtype) for array in coarse.values()} == {"bfloat16"}
    np.testing.assert_array_equal(coarse["model.norm.weight"].astype(np.float64), np.full(12, 1 + 2.0**-7))
    single = to_arrays(cast(from_arrays(config, arrays), "float32"))
    assert_bitwise(single, {name: array.astype(np.float32) for name, array in arrays.items()})
    assert_bitwise(to_arrays(cast(cast(from_arrays(config, single), "float64"), "float32")), single)
    with pytest.raises(ValueError, match=r"dtype: 'int8'; known are"):
        cast(tiny("llama"), "int8")
