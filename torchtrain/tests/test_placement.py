"""A model whose layers lie on several devices answers as it does on one, bit for bit.

Without a GPU accelerate can put layers off to disk, and its hooks run.
"""

import random

import pytest
import torch
from lm_eval.api.instance import Instance

from anchorline.errors import UserError
from torchtrain.evaluation.evaluate import check_suite
from torchtrain.evaluation.model import SharedPrefixLM
from torchtrain.evaluation.perplexity import document_losses
from torchtrain.evaluation.suite import Suite
from torchtrain.modeling.load import load_for_evaluation
from torchtrain.modeling.placement import check_can_spread, format_devices, input_device
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

MAPS = {
    "a layer on disk": {
        "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu",
        "model.rotary_emb": "cpu", "lm_head": "cpu",
    },
    "the first and the last on disk": {
        "model.embed_tokens": "disk", "model.layers.0": "cpu", "model.layers.1": "cpu", "model.norm": "disk",
        "model.rotary_emb": "cpu", "lm_head": "disk",
    },
}  # fmt: skip


def _prompts() -> list[str]:
    draw = random.Random(0)
    base = "".join(draw.choices("abcdefgh", k=40))
    return [base[:n] + "".join(draw.choices("klmn", k=8)) for n in (0, 20, 20, 40)]


def measure(model) -> tuple:
    """Answers in batches and one by one, likelihoods, losses."""
    prompts = _prompts()
    lm, single = (SharedPrefixLM(model, tiny_tokenizer(), tokens, 256) for tokens in (100_000, 1))
    asked = [Instance("generate_until", {}, (text, {"until": [], "max_gen_toks": 8}), 0) for text in prompts]
    return (
        lm.generate_until(asked),
        single.generate_until(asked),
        single.loglikelihood([Instance("loglikelihood", {}, (text, " a"), 0) for text in prompts]),
        document_losses(model, lm.tok_encode(prompts[-1])).tolist(),
    )


@pytest.fixture(scope="module", params=["qwen3", "llama"])  # whose embeddings are tied
def folder(request, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, max_position_embeddings=256).save_pretrained(place)
    return place


@pytest.mark.parametrize("name", MAPS)
def test_a_spread_model_answers_as_one_on_one_device(folder, name):
    whole = load_for_evaluation(str(folder))
    spread = load_for_evaluation(str(folder), device_map=MAPS[name])
    assert any(parameter.device.type == "meta" for parameter in spread.parameters())
    assert input_device(spread).type == "cpu"
    assert set(format_devices(spread).split(", ")) == {"cpu", "disk"}
    assert measure(spread) == measure(whole)


def test_weights_that_are_put_off_are_checked_too(tmp_path):
    model = tiny_model("qwen3")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds a number that is not finite"):
        load_for_evaluation(str(tmp_path), device_map=MAPS["a layer on disk"])


def test_a_map_that_does_not_fit_is_one_line(folder, monkeypatch):
    layers = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    for wrong, said in (
        ({}, r"^device_map \{\}: names no module"),
        ({"": "gpu"}, "^device_map '': 'gpu' is no place"),
        ({"": "meta"}, "^device_map '': 'meta' is no place"),
        ({"": "5"}, "^device_map '': '5' is no place"),
        ({"": -1}, "^device_map '': -1 is no place"),
        ({"": 99}, "^device_map '': 99 is not here, where there are"),
        ({"": "cuda:99"}, "^device_map '': 'cuda:99' is not here"),
        ({"foo": "cpu"}, "^device_map 'foo': the model has no such module; it has model, lm_head"),
        ({"": "cpu", "model.layers.7": "cpu"}, r"^device_map 'model\.layers\.7': the model has no such module"),
        ({"model": "cpu"}, r"^device_map: names no place for lm_head\.weight"),
        (layers, r"^device_map: names no place for model\.layers\.0\."),
        (layers | {"model": "disk"}, r"^device_map: model\.embed_tokens\.weight lies under"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            load_for_evaluation(str(folder), device_map=wrong)
        assert "\n" not in str(raised.value)
    assert load_for_evaluation(str(folder), device_map={"": "cpu"}).device.type == "cpu"
    with pytest.raises(ValueError, match="device_map"):
        Suite.model_validate({"tasks": ["fwe"], "device_map": "auot"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="device_map needs the package accelerate: pip install accelerate"):
        check_can_spread("auto")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
def test_a_map_by_name_needs_a_gpu():
    with pytest.raises(UserError, match="device_map auto: there is no GPU here; remove it"):
        check_suite(Suite.model_validate({"tasks": ["fwe"], "device_map": "auto"}), [1024])
