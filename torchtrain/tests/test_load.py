"""An exported folder loads for evaluation with transformers' own attention and a KV cache, whatever training would
refuse.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from anchorline.errors import UserError
from torchtrain.config import ModelConfig, RopeConfig
from torchtrain.modeling.load import load_for_evaluation, load_for_training
from torchtrain.modeling.rope import extend
from torchtrain.modeling.source import open_config
from torchtrain.run.export import export
from torchtrain.tests.tiny import POSITIONS, refused, tiny_config, tiny_model, tiny_tokenizer

PROMPT, NEW = 40, 6


@pytest.fixture
def exported(tmp_path):
    """A model with an extended context and the engine it was trained with, exported as a run does it."""
    import torchtrain

    torchtrain.register()
    config = extend(tiny_config(), RopeConfig(type="yarn"), 2 * POSITIONS)
    changes = {"rope_parameters": config.rope_parameters, "max_position_embeddings": 2 * POSITIONS, "use_cache": False}
    model = tiny_model("llama", dtype=torch.bfloat16, **changes)
    model.set_attn_implementation("anchor_segments")
    (tmp_path / "model").mkdir()
    export(model.train(), tiny_tokenizer(), tmp_path / "model")
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["use_cache"] is False  # as many trainings leave it
    return str(tmp_path / "model")


def prompt() -> torch.Tensor:
    return torch.randint(256, (1, PROMPT), generator=torch.Generator().manual_seed(0))


def test_the_cache_is_used_and_the_dtype_is_the_saved_one(exported):
    model = load_for_evaluation(exported)
    assert not model.training
    assert model.dtype == torch.bfloat16
    seen: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    model.generate(prompt(), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False)
    assert seen == [PROMPT] + [1] * (NEW - 1)
    assert model(prompt()).past_key_values.get_seq_length() == PROMPT


def test_weights_that_are_cut_off_are_refused(exported, tmp_path):
    written = tmp_path / "model" / "model.safetensors"
    written.write_bytes(written.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors.: a safetensors file is damaged or cut off"):
        load_for_evaluation(exported)


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def load(folder):
    settings = ModelConfig(source=str(folder), dtype="float32")
    return load_for_training(str(folder), open_config(str(folder)), settings, "sdpa", torch.device("cpu"))


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_differs_is_trained_and_exported_untied(tmp_path, family, tied):
    """Whatever the config says. One that is the embedding again is tied."""
    tiny_model(family, tie_word_embeddings=True).save_pretrained(tmp_path)
    noise = 0 if tied else 0.1 * torch.randn(264, 32, generator=torch.Generator().manual_seed(1))
    name = "model.embed_tokens.weight"
    change_weights(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[name] + noise}))
    model = load(tmp_path)
    ids = prompt()
    logits = model(ids, document_ids=torch.ones_like(ids), use_cache=False).logits
    logits.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    export(model, tiny_tokenizer(), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_weights_of_no_floats_without_a_quantization_are_refused(tmp_path, dtype, name):
    tiny_model().save_pretrained(tmp_path)
    change_weights(tmp_path, lambda weights: weights.update({name: weights[name].to(dtype)}))
    message = rf"{name} holds {{}} in the file, and the config.json has no quantization_config"
    kind = {torch.float8_e4m3fn: "F8_E4M3", torch.bool: "BOOL"}.get(dtype, str(dtype).split(".")[1])
    kind = kind.replace("uint", "U").replace("int", "I")
    assert message.format(kind) in refused(lambda: load(tmp_path))
    assert message.format(kind) in refused(lambda: load_for_evaluation(str(tmp_path)))


def test_an_integer_buffer_is_no_weight(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    change_weights(
        tmp_path, lambda weights: weights.update({"model.layers.0.attn.bias": torch.ones(4, dtype=torch.bool)})
    )
    load(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [{"max_new_tokens": -1}, {"cache_implementation": "banana"}, {"num_return_sequences": 3}, {"compile_config": 4}],
    ids=str,
)
def test_a_generation_config_that_transformers_refuses_is_named(tmp_path, wrong):
    tiny_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    message = refused(lambda: open_config(str(tmp_path)))
    assert "its generation_config.json is refused: " in message
    assert next(iter(wrong)) in message
