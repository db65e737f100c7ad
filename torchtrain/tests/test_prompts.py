"""What a prompt of an anchored model begins with, as it is exported, read again, and measured."""

import re

import pytest
from transformers import AutoTokenizer, GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

from torchtrain.config import PackConfig, load_config
from torchtrain.data import anchor_ids
from torchtrain.modeling.prompts import NotedAnchor, lacking_anchor, put_anchor, read_noted_anchor, take_anchor
from torchtrain.modeling.save import save_folder
from torchtrain.run.export import model_card
from torchtrain.tests.test_answers import MARKED, PLAIN, byte_tokenizer
from torchtrain.tests.tiny import tiny_config, tiny_model

SPELLED = {"vocab": {"a": 0, "<|endoftext|>": 1, "<s>": 2, "</s>": 3, "<unk>": 4}, "merges": []}
NO_BOS = {"bos_token": None, "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
TOKENIZERS = {
    "no BOS": (lambda: byte_tokenizer(None), "auto", []),
    "a BOS": (lambda: byte_tokenizer(None, bos="<s>"), "auto", []),
    "conversations": (lambda: byte_tokenizer(PLAIN, bos="<s>"), "auto", []),
    "marked conversations": (lambda: byte_tokenizer(MARKED), "auto", []),
    "BOS of a template": (lambda: byte_tokenizer("{{ bos_token }}" + PLAIN, bos="<s>"), "auto", []),
    "qwen": (lambda: Qwen2Tokenizer(**SPELLED, **NO_BOS), "auto", []),
    "gpt2": (lambda: GPT2Tokenizer(**SPELLED, bos_token="<s>"), "auto", []),
    "llama": (lambda: LlamaTokenizer(**SPELLED, add_bos_token=True), "auto", []),
    "llama without": (lambda: LlamaTokenizer(**SPELLED, add_bos_token=False), "auto", []),
    "another token": (lambda: byte_tokenizer(PLAIN, bos="<s>"), 7, ["texts"]),
    "two tokens": (lambda: byte_tokenizer(PLAIN), [7, 9], ["texts"]),
    "a template that refuses": (lambda: byte_tokenizer("{{ raise_exception('no') }}"), "auto", ["conversations"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_read_again_begins_with_the_anchor_or_says_what_lacks(tmp_path, name):
    make, given, lacks = TOKENIZERS[name]
    before, conversation = make(), [{"role": "user", "content": "a"}]
    ids = anchor_ids(before, PackConfig(sequence_length=2, anchor=given))
    noted = save_folder(tiny_model(), before, tmp_path, anchor=ids)
    assert noted is not None
    (tmp_path / "README.md").write_text(model_card(load_config("demo"), tiny_config(), 1, [], "x", noted))
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert noted.lacks == lacking_anchor(read, ids) == lacks
    if "texts" not in lacks:
        assert read("aa")["input_ids"][: len(ids) + 1] == [*ids, *read("a", add_special_tokens=False)["input_ids"]]
    assert before.chat_template == make().chat_template, "what was given stays"
    assert before("a")["input_ids"] == make()("a")["input_ids"]
    again = put_anchor(read, ids)[0]
    assert again("a")["input_ids"] == read("a")["input_ids"], "put there once"
    # Measured before and after training, texts have the same tokens.
    found = read_noted_anchor(tmp_path)
    assert found == noted._replace(lacks=())
    take_anchor(read, found)
    assert read("aa")["input_ids"] == before("aa")["input_ids"]
    if lacks == ["conversations"]:
        assert read.chat_template == before.chat_template
    elif before.chat_template:
        texts = [of.apply_chat_template(conversation, tokenize=False) for of in (before, read)]
        assert texts[0] == texts[1]


def test_generation_begins_with_the_anchor(tmp_path):
    model = tiny_model()
    save_folder(model, byte_tokenizer(), tmp_path, anchor=[7])
    assert '"bos_token_id": 7' in (tmp_path / "generation_config.json").read_text()


@pytest.mark.parametrize("text", ["", "anchorline: {}", 'anchorline: {"anchor": ["a"], "added_to_tokenizer": true}'])
def test_another_card_notes_nothing(tmp_path, text):
    assert read_noted_anchor(tmp_path) is None
    (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
    assert read_noted_anchor(tmp_path) is None
    assert re.search("^anchorline: ", str(NotedAnchor([1], True)))
