"""The exported folder, as someone with plain transformers finds it."""

import json
from contextlib import suppress

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import torchtrain
from torchtrain.config import RopeConfig
from torchtrain.modeling.rope import extend
from torchtrain.run.export import export
from torchtrain.run.folder import RunFolder
from torchtrain.tests.tiny import POSITIONS, tiny_config, tiny_model, tiny_tokenizer

LENGTH = 2 * POSITIONS


def test_the_config_carries_length_and_rope_and_no_engine(tmp_path):
    """For every type of RoPE: test_readers.py."""
    torchtrain.register()
    lists = {"short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]}
    longer = extend(tiny_config(), RopeConfig(type="longrope", **lists), LENGTH)
    trained = tiny_model(rope_parameters=longer.rope_parameters, max_position_embeddings=LENGTH).train()
    trained.set_attn_implementation("anchor_segments")
    folder = tmp_path / "model"
    folder.mkdir()
    export(trained, tiny_tokenizer(), folder)
    written = json.loads((folder / "config.json").read_text())
    assert written["max_position_embeddings"] == LENGTH
    assert written["rope_parameters"] == trained.config.rope_parameters
    assert written["use_cache"] is True
    assert "anchor" not in json.dumps(written)
    assert not [key for key in written if "attn_implementation" in key]
    reloaded = AutoModelForCausalLM.from_pretrained(folder)
    for name in ("inv_freq", "original_inv_freq"):
        assert torch.equal(getattr(reloaded.model.rotary_emb, name), getattr(trained.model.rotary_emb, name))


def test_what_a_library_saved_in_the_models_place_gets_no_name(tmp_path, monkeypatch):
    """As transformers does of a model that PEFT's adapter was put into."""
    real = LlamaForCausalLM.save_pretrained

    def save_adapter_alone(model, folder, **how):
        real(model, folder, **how)
        for path in (folder / "config.json", folder / "model.safetensors"):
            path.rename(path.with_name(f"adapter_{path.name}"))

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", save_adapter_alone)
    with pytest.raises(OSError, match=r"config\.json or the weights are missing"):
        export(tiny_model(), tiny_tokenizer(), tmp_path)


def test_an_interrupted_export_leaves_no_file(tmp_path):
    folder = RunFolder(str(tmp_path))
    with suppress(KeyboardInterrupt), folder.new_export(folder.model) as made:
        (made / "config.json").touch()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
