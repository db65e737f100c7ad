"""An exported folder loads for evaluation with transformers' own attention and a KV cache, whatever training would
refuse.
"""

import json

import pytest
import torch
from transformers import GenerationMixin

from anchorline.errors import UserError
from torchtrain.config import RopeConfig
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.rope import extend
from torchtrain.run.export import export
from torchtrain.tests.tiny import POSITIONS, tiny_config, tiny_model, tiny_tokenizer

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


def generate(model: GenerationMixin, **how):
    """The logits [NEW, V] of tokens chosen one after another, and the tokens."""
    found = model.generate(
        prompt(),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **how,
    )
    return torch.cat(found.logits), found.sequences


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_exported_folder_generates_with_a_cache_what_it_does_without(exported, attention):
    model = load_for_evaluation(exported, attention, torch.float32)
    assert not model.training
    assert model.config._attn_implementation == attention
    cached, tokens = generate(model)
    plain, same = generate(model, use_cache=False)
    assert torch.equal(tokens, same)
    # `.double()` leaves RoPE's tables as they are computed in float32; both sides of the comparison share them.
    truth = model.double()(tokens[:, :-1], use_cache=False).logits[0, PROMPT - 1 :]
    # A cache cuts sums another way: it errs no more than twice as far from float64 as the whole row does, plus one
    # rounding.
    one_rounding = torch.finfo(torch.float32).eps * truth.abs().max()
    assert (cached.double() - truth).abs().max() <= 2 * (plain.double() - truth).abs().max() + one_rounding


def test_the_cache_is_used_and_the_dtype_is_the_saved_one(exported):
    model = load_for_evaluation(exported)
    assert model.dtype == torch.bfloat16
    seen: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    generate(model)
    assert seen == [PROMPT] + [1] * (NEW - 1)
    assert model(prompt()).past_key_values.get_seq_length() == PROMPT


def test_an_attention_that_has_no_cache_and_weights_that_are_missing(exported, tmp_path):
    with pytest.raises(UserError, match=r"^attention 'anchor_segments': .*choose sdpa or eager$"):
        load_for_evaluation(exported, "anchor_segments")  # type: ignore[arg-type]
    written = tmp_path / "model" / "model.safetensors"
    written.write_bytes(written.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"model\.safetensors.: a safetensors file is damaged or cut off"):
        load_for_evaluation(exported)
