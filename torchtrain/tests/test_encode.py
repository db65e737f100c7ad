"""Encoding: text is text, and a document in pieces has the tokens of the whole."""

import json
from functools import cache
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from anchorline.errors import UserError
from torchtrain.data import encode
from torchtrain.data.encode import Encoder, list_control_tokens
from torchtrain.tests.data_fixtures import word_tokenizer

# What tokenizers treat in ways of their own, and words that merges were learned of.
FRAGMENTS = [
    *"abzAZ'sSdt019 \t\n\r,.!?/_-<>éßﬁ中文。，、🙂",
    "  ", "\n\n", " \n", "\r\n", "e\u0301", "\u00a0", "\u2028", "\u3000", "\u0e01\u0e33", "'ll", "</s>", "<s>",
    "\u2581", " the", " word", "word ", "The cat", " sat on the mat", "don't ", "1234567 ", "中文，", "x\n", " and",
]  # fmt: skip
WORDS = [" the", " a", "The cat", " sat", " on", "\n", "中文，"]


def text_of(seed: int) -> str:
    """A text of fragments in a random order, half of them words, so that it can be cut in many places."""
    random = Random(seed)
    return "".join(random.choice(random.choice((FRAGMENTS, WORDS))) for _ in range(random.randrange(150)))


TEXTS = st.integers(0, 2**32 - 1).map(text_of)
LEARNED = ["The cat sat on the mat, and the word was 12345. Don't!\n\n", "中文，文。 a  b   c\tword word and the"] * 20
SPECIAL = ["<unk>", "<s>", "</s>"]


def fast(backend: dict) -> PreTrainedTokenizerFast:
    made = Tokenizer.from_str(json.dumps(backend))
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def learned(model, trainer, pre_tokenizer) -> dict:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(LEARNED, trainer)
    return json.loads(tokenizer.to_str())


@cache
def byte_level() -> dict:
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return learned(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False))


@cache
def metaspace(kind: str) -> dict:
    if kind == "unigram":
        trainer = trainers.UnigramTrainer(
            vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
        return learned(models.Unigram(), trainer, pre_tokenizers.Metaspace())
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    return learned(models.BPE(unk_token="<unk>", fuse_unk=True), trainer, pre_tokenizers.Metaspace())


def by_pattern(pattern: str) -> dict:
    """Llama 3's pipeline: words by a pattern, then bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return byte_level() | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, own]}}


_PREPEND = {"type": "Prepend", "prepend": "\u2581"}
_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_DIGITS = {"type": "Digits", "individual_digits": True}
_BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
_WHOLE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
_LEFT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
PIPELINES = {
    "smollm2": lambda: byte_level(),
    "digits, bytes with a space in front": lambda: (
        byte_level() | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]}}
    ),
    "unigram": lambda: metaspace("unigram") | {"normalizer": {"type": "NFKC"}},
    "bpe of words": lambda: metaspace("bpe"),
    "llama 2": lambda: (
        metaspace("bpe") | {"normalizer": {"type": "Sequence", "normalizers": [_PREPEND, _MARK]}, "pre_tokenizer": None}
    ),
    "mistral": lambda: metaspace("bpe") | {"pre_tokenizer": _WHOLE},
    "gemma": lambda: metaspace("bpe") | {"normalizer": _MARK, "pre_tokenizer": _LEFT},
    "llama 3": lambda: by_pattern(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pieces_have_the_tokens_of_the_whole(name, monkeypatch):
    tokenizer = fast(PIPELINES[name]())
    made = 0

    @settings(max_examples=40)
    @given(TEXTS, st.sampled_from([1, 2, 7, 30]), st.sampled_from(["text", "control"]))
    def same(text, size, special):
        nonlocal made
        monkeypatch.setattr(encode, "PIECE", size)
        encoder = Encoder(tokenizer, special)
        made += len(list(encoder._pieces(text))) - 1
        (found,) = encoder.encode([text])
        monkeypatch.setattr(encode, "PIECE", 1 << 16)
        (whole,) = encoder.encode([text])
        assert found.tolist() == whole.tolist()

    same()
    assert made > 50


@pytest.mark.parametrize(
    "change",
    [
        lambda backend: backend["added_tokens"].append(added("e c")),
        lambda backend: backend["added_tokens"].append(added("cat")),
        lambda backend: backend["added_tokens"].append(added("at", rstrip=True)),
        lambda backend: backend.update(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        lambda backend: backend.update(normalizer={"type": "Replace", "pattern": {"String": "t s"}, "content": "x"}),
    ],
)
def test_a_document_is_not_cut_where_that_would_change_its_tokens(change, monkeypatch):
    monkeypatch.setattr(encode, "PIECE", 3)
    backend = json.loads(json.dumps(byte_level()))
    change(backend)
    tokenizer = fast(backend)
    text = "The cat sat on the mat. " * 30
    (found,) = Encoder(tokenizer, "control").encode([text])
    assert found.tolist() == tokenizer(text, add_special_tokens=False).input_ids


def added(content: str, rstrip: bool = False) -> dict:
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": False, "special": False}
    return {"id": 400, "content": content} | flags


class Shouting(PreTrainedTokenizerFast):
    """A model's own class, which does more than its backend."""

    def _encode_plus(self, text, *arguments, **settings):
        return super()._encode_plus([one.upper() for one in text], *arguments, **settings)


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
def test_tokens_are_those_of_a_call_whatever_calls_before_left_behind(kind):
    made = kind(tokenizer_object=Tokenizer.from_str(json.dumps(byte_level())), eos_token="</s>", pad_token="<s>")
    texts = ["The cat", "", "sat on the </s> mat " * 9]
    expected = [made([text], add_special_tokens=False, split_special_tokens=True).input_ids[0] for text in texts]
    encoder = Encoder(made, "text")
    made(texts, padding=True, truncation=True, max_length=2, split_special_tokens=False)
    assert [ids.tolist() for ids in encoder.encode(texts)] == expected


def test_a_stretch_that_cannot_be_cut_is_too_long(monkeypatch):
    monkeypatch.setattr(encode, "MOST_WITHOUT_CUT", 100_000)
    encoder = Encoder(fast(byte_level()), "text")
    assert not encoder.too_long("a word " * 50_000)
    assert encoder.too_long("a word " * 50 + "x" * 200_000)


# --- special tokens ---------------------------------------------------------------------------------------------------

WRITTEN = "The cat </s> sat<s>on</s>the mat <unk>"


@pytest.mark.parametrize("name", ["smollm2", "unigram", "bpe of words", "llama 2", "mistral"])
def test_a_special_token_in_a_text_is_text(name):
    tokenizer = fast(PIPELINES[name]())
    control = set(list_control_tokens(tokenizer).values())
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id} <= control
    encoder = Encoder(tokenizer, "text")
    (found,) = encoder.encode([WRITTEN])
    assert not control & set(found.tolist())
    (as_before,) = Encoder(tokenizer, "control").encode([WRITTEN])
    assert as_before.tolist() == tokenizer(WRITTEN, add_special_tokens=False).input_ids
    assert [token for token in as_before.tolist() if token in control][:3] == [2, 1, 2]
    # Without one in it, both are the same.
    (plain,), (other) = (
        encoder.encode(["The cat, and 12"]),
        list(Encoder(tokenizer, "control").encode(["The cat, and 12"])),
    )
    np.testing.assert_array_equal(plain, other[0])
    assert [encoder.looks_special(text) for text in (WRITTEN, "a <unk> b", "a < s>", "")] == [True, True, False, False]


def test_a_control_token_that_the_model_knows_as_a_word_is_spelled_out():
    tokenizer = word_tokenizer()
    (found,) = Encoder(tokenizer, "text").encode(["w0 </s> w1 <s>"])
    assert found.tolist() == [3, 0, 0, 4, 0, 0]  # `<` and `/s>` are words it does not know
    (as_before,) = Encoder(tokenizer, "control").encode(["w0 </s> w1 <s>"])
    assert as_before.tolist() == [3, 2, 4, 1]


def test_one_that_cannot_be_written_otherwise_is_refused():
    tokenizer = word_tokenizer(eos="w1")
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["model"]["vocab"] = {"x": 0, "<unk>": 1, "w": 2}
    backend["added_tokens"] = [{"id": 0, "content": "x", "special": True} | added("x") | {"id": 0, "special": True}]
    single = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(backend)), eos_token="x")
    with pytest.raises(
        UserError, match=r"data\.special_tokens 'text': a document holds 'x', which this tokenizer can only"
    ):
        list(Encoder(single, "text").encode(["w x w"]))
