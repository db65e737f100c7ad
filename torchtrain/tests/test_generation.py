"""Answers and losses: each beside its slow twin."""

import json
import random
from functools import partial

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import processors

from anchorline.errors import UserError
from torchtrain.evaluation.model import SharedPrefixLM
from torchtrain.evaluation.perplexity import (
    document_losses,
    find_key_tokens,
    long_documents,
    measure_perplexity,
)
from torchtrain.evaluation.suite import KeyTokensConfig, PerplexityConfig
from torchtrain.evaluation.tasks.materials import quiet_library
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

ROOM = 12


def _prompts() -> list[str]:
    """Prompts that share starts of several lengths: a copy, a prefix of another, one of one token, none in common."""
    draw = random.Random(0)
    base = "".join(draw.choices("abcdefghij", k=60))
    cuts = [(50, 20), (60, 3), (0, 7), (60, 1), (50, 15), (59, 0), (0, 1)]
    prompts = [base[:shared] + "".join(draw.choices("klmnop", k=own)) for shared, own in cuts]
    return [*prompts, prompts[0]]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", max_position_embeddings=256).eval()


def _lm(model, batch_tokens=100_000, **more) -> SharedPrefixLM:
    with quiet_library():
        return SharedPrefixLM(model, tiny_tokenizer(), batch_tokens, 256, **more)


def _answers(lm, prompts, **settings) -> list[str]:
    given = {"until": [], "max_gen_toks": ROOM} | settings
    with quiet_library():
        return lm.generate_until([Instance("generate_until", {}, (text, given), 0, ("t", 0, 1)) for text in prompts])


def _stock(model) -> HFLM:
    """lm-eval's own class, one prompt at a time."""
    with quiet_library():
        return HFLM(pretrained=model, tokenizer=tiny_tokenizer(), max_length=256)


@pytest.fixture(scope="module")
def alone(model) -> list[str]:
    return _answers(_stock(model), _prompts())


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_answers_are_those_of_each_prompt_alone(model, alone, batch_tokens):
    prompts = _prompts()
    assert len({*alone}) == len(prompts) - 1  # only the copies agree
    long = [text for text in prompts if len(text) > 1]  # a batch with a prompt of one token shares nothing
    lm = _lm(model, batch_tokens)
    assert _answers(lm, prompts) == alone
    lm.set_length(256)
    assert _answers(lm, long) == [answer for answer, text in zip(alone, prompts, strict=True) if text in long]
    # What is computed is the tree of all prompts but their last tokens, and each last token.
    tree = {text[:i] for text in long for i in range(1, len(text))}
    assert (lm.prompt_tokens, lm.computed_tokens) == (sum(map(len, long)), len(tree) + len(long))


def test_an_answer_ends_where_the_model_ends_it(model, alone, monkeypatch):
    (stop,) = tiny_tokenizer().encode(next(c for c in alone[0][1:] if c.isascii()))
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop, 257])
    until = _answers(_lm(model), _prompts())
    assert until == _answers(_stock(model), _prompts()) != alone
    for config in (model.generation_config, model.config):  # neither says it: the tokenizer's counts
        monkeypatch.setattr(config, "eos_token_id", None)
    lm = _lm(model)
    lm.tokenizer.eos_token = lm.tokenizer.convert_ids_to_tokens(stop)
    ended = tiny_tokenizer().decode([stop])
    assert _answers(lm, _prompts()) == [answer.partition(ended)[0] for answer in alone]


SETTINGS = {"do_sample": True, "temperature": 0.7}, {"temperature": 1.5, "top_k": 5}, {"num_beams": 3}


@pytest.mark.parametrize("settings", [*SETTINGS, {"repetition_penalty": 1.5}], ids=str)
def test_requests_that_sample_or_search_are_answered_behind_the_anchor(model, alone, settings):
    """As lm-eval's own class answers prompts that begin with it."""
    prompts = _prompts()[:3]
    for anchor, begun in (([], prompts), ([256], [f"<s>{text}" for text in prompts])):
        torch.manual_seed(0)
        own = _answers(_lm(model, 1, anchor=anchor), prompts, **settings)
        torch.manual_seed(0)
        in_order = sorted(begun)  # the order of the draws
        stock = dict(zip(in_order, [_answers(_stock(model), [text], **settings)[0] for text in in_order], strict=True))
        assert own == [stock[text] for text in begun]
        assert own != alone[:3]


def test_settings_that_cannot_be_are_one_line(model):
    for settings, said in (({"do_sample": True}, "temperature"), ({"top_z": 3}, r"not used by the model: \['top_z'\]")):
        with pytest.raises(UserError, match=rf"^t: generation_kwargs .*{said}.*; correct the task file$"):
            _answers(_lm(model), ["a", "b"], **settings)


def test_lm_evals_requests_are_answered_as_by_its_own_class(model):
    """Texts that end an answer, prompts that are cut, likelihoods: against HFLM's own."""
    texts = ["abc defg", "abc dxy", "q", "a" * 260]
    stock, lm = _stock(model), _lm(model)
    free = _answers(stock, texts)
    until = next(c for c in free[0][1:] if c.isascii() and c.strip())
    for settings in ({}, {"until": [until]}, {"until": until, "max_gen_toks": 9}):
        assert _answers(lm, texts, **settings) == _answers(stock, texts, **settings)
    assert lm.cut_prompts == 3  # one, asked three times
    lm.set_length(256, cut_middle=True)
    long, short = (["a" * n + "b" * n] for n in (150, 100))
    assert _answers(lm, long, max_gen_toks=56) == _answers(stock, short, max_gen_toks=56)
    pairs = [Instance("loglikelihood", {}, (t, " next"), i) for i, t in enumerate(texts[:3])]
    texts.append("".join(map(str, range(250))))
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    with quiet_library():
        found = zip(lm.loglikelihood(pairs), stock.loglikelihood(pairs), strict=True)
        assert [a == pytest.approx(b, abs=1e-4) for a, b in found] == [True] * 3  # other batches
        assert lm.loglikelihood_rolling(rolling) == pytest.approx(stock.loglikelihood_rolling(rolling), rel=1e-5)


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>", "<s> $A </s>"])
def test_perplexities_of_texts_are_lm_evals(model, template):
    """Where the tokenizer adds tokens of its own, too: BOS after lm-eval's own first token is read, and scored."""
    tokenizer = tiny_tokenizer()
    special = [("<s>", 256), ("</s>", 257)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    texts = ["abc", "", "<s>abc", "a b " * 100]  # the last is read in windows
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    with quiet_library():
        stock = HFLM(pretrained=model, tokenizer=tokenizer, max_length=256)
        found = SharedPrefixLM(model, tokenizer, 1, 256).loglikelihood_rolling(asked)
        assert found == pytest.approx(stock.loglikelihood_rolling(asked), rel=1e-5)


def test_every_request_sees_the_anchor_once(model):
    """Whatever its kind, where a prompt is cut too, and where the tokenizer puts it there itself."""
    bos = tiny_tokenizer()
    bos.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    for tokenizer, anchor in ((tiny_tokenizer(), [256]), (bos, [256]), (bos, [])):
        with quiet_library():
            lm = SharedPrefixLM(model, tokenizer, 1, 64, anchor)
            rows, call = [], lm._model_call
            lm._model_call = lambda ids, rows=rows, call=call: [rows.extend(ids.tolist()), call(ids)][1]
            for context in ("ab", "<s>ab", "c" * 80, ""):
                lm.loglikelihood([Instance("loglikelihood", {}, (context, "de"), 0)])
            for text in ("ab" * 30, "ab" * 60):
                lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])
            for text in ("ab", "<s>ab", "c" * 80):
                ids_BT, mask_BT = lm.tok_batch_encode([text, "d"], left_truncate_len=50)
                rows.append(ids_BT[0][mask_BT[0].bool()].tolist())
        assert max(map(len, rows)) <= 64
        # lm-eval puts its own BOS before a whole text, in front of the tokenizer's.
        twice = [n for n, row in enumerate(rows) if 256 in row[1:]]
        assert twice == ([4, 5] if tokenizer is bos else [])
        # lm-eval cuts a prompt on the left, and a long text into windows: the third, the seventh, the last.
        assert [row[0] == 256 for row in rows] == [n in (0, 1, 3, 4, 5, 7, 8) or bool(anchor) for n in range(10)]


def test_a_model_with_a_window_answers_each_prompt_alone():
    model = tiny_model("mistral", sliding_window=16, max_position_embeddings=256).eval()
    assert not _lm(model).shares_prefixes
    assert _answers(_lm(model), _prompts()) == _answers(_stock(model), _prompts())


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_losses_are_the_models_whatever_it_does_to_its_logits(model, monkeypatch, scale):
    """Read in parts, with logits scaled as Granite and Cohere do."""
    monkeypatch.setattr("torchtrain.evaluation.perplexity._TOKENS", 14)
    monkeypatch.setattr("torchtrain.evaluation.perplexity._LOGITS", 5)
    ids, forward = tiny_tokenizer()(_prompts()[0]).input_ids, model.forward

    def scaled(**inputs):
        out = forward(**inputs)
        out.logits = out.logits / scale
        return out

    monkeypatch.setattr(model, "forward", scaled)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    truth = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    own = document_losses(model, ids)
    assert len(own) == len(ids) - 1
    assert torch.allclose(own.double(), truth, atol=64 * 2**-23 * truth.abs().max())


def test_a_model_that_diverged_is_refused_whatever_it_is_asked():
    diverged = tiny_model("qwen3", max_position_embeddings=256).eval()
    with torch.no_grad():
        diverged.lm_head.weight[7] = torch.nan
    prompts = ["abc", "de", "f" * 30, "ih", "ggg"]
    asked = (
        lambda: _answers(_lm(diverged), prompts),
        lambda: _answers(_lm(diverged, 1), prompts),
        lambda: _answers(_lm(diverged), prompts, do_sample=True, temperature=1.0),
        lambda: _lm(diverged)._loglikelihood_tokens([(("a", "b"), [1, 2, 3], [1])]),
        lambda: document_losses(diverged, list(range(60))),
    )
    for ask in asked:
        with pytest.raises(UserError, match="its logits are not finite; the checkpoint has diverged"):
            ask()
    within = tiny_model("qwen3", max_position_embeddings=256).eval()  # finite for the first token of an answer
    ids = tiny_tokenizer()(prompts[0]).input_ids
    with torch.no_grad():
        first = int(within(torch.tensor([ids])).logits[0, -1].argmax())
        assert first not in ids
        within.model.embed_tokens.weight[first] = torch.nan
    assert _answers(_lm(within), prompts[:1], max_gen_toks=1)
    with pytest.raises(UserError, match="its logits are not finite"):
        _answers(_lm(within), prompts[:1], max_gen_toks=3)


@pytest.mark.parametrize(("text", "tokens"), [("錨" * 100, 300), ("a" * 98, 100)], ids=["bytes", "special"])
def test_documents_are_long_enough_by_tokens_and_not_by_characters(tmp_path, text, tokens):
    """A character of Chinese is three bytes, and as many tokens of a byte-level tokenizer; special ones count too."""
    tokenizer = tiny_tokenizer()
    if tokens == 100:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
        )
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config = PerplexityConfig.model_validate({"source": {"files": str(tmp_path / "a.jsonl")}, "documents": 1})
    (document,) = long_documents(config, tokenizer, tokens)
    assert len(document) == tokens
    with pytest.raises(UserError, match=f"0 documents hold {tokens + 1} tokens"):
        long_documents(config, tokenizer, tokens + 1)


# A word costs .5 where it stands before, else 4. Words 4, 6, 9 and 11 stand before.
WORDS = [7, 1, 2, 3, 7, 4, 1, 5, 6, 5, 8, 4]


def losses_by_hand(ids):
    return torch.tensor([0.5 if word in ids[:i] else 4.0 for i, word in enumerate(ids)])[1:]


@pytest.mark.parametrize(
    ("settings", "keys"),
    [
        # Short contexts begin at 0 for words 3 and 4, at 2 for 5 and 6, .., at 8 for 11: 6 lacks its 1, and 11 its 4.
        ({"stride": 2}, [6, 11]),
        ({"stride": 1}, [4, 6, 11]),
        ({"stride": 100}, []),
        ({"stride": 2, "context": 5}, [11]),
        ({"stride": 2, "gain": 3.5}, []),  # more than this
        ({"stride": 2, "gain": 3.4}, [6, 11]),
        ({"stride": 2, "most_loss": 0.5}, []),  # less than this
        ({"stride": 2, "most_loss": 0.6}, [6, 11]),
    ],
)
def test_key_tokens_are_those_that_the_definition_gives_by_hand(settings, keys):
    assert find_key_tokens(losses_by_hand, WORDS, KeyTokensConfig(**{"context": 3} | settings)) == keys


def test_longppl_is_the_loss_of_the_key_tokens_of_a_judge(tmp_path):
    tokenizer = tiny_tokenizer()
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": x * 40}) + "\n" for x in ("abcd ", "xyz w")))
    keys = {"context": 20, "stride": 8, "gain": 1e-4, "most_loss": 50.0}
    source = {"files": str(tmp_path / "a.jsonl")}
    config = PerplexityConfig.model_validate({"source": source, "documents": 2, "key_tokens": keys})
    model, judge = (tiny_model(family, max_position_embeddings=256).eval() for family in ("qwen3", "qwen2"))
    documents = long_documents(config, tokenizer, 100)
    judged = [find_key_tokens(partial(document_losses, judge), ids, config.key_tokens) for ids in documents]
    for given, telling in ((None, model), (judged, judge)):
        fields = measure_perplexity(model, tokenizer, config, 100, lambda: None, given)
        expected = []
        for index, ids in enumerate(documents):
            own = []
            for place in range(20, 100):
                start = (place - 20) // 8 * 8
                short = document_losses(telling, ids[start : place + 1])[-1]
                if short - document_losses(telling, ids)[place - 1] > 1e-4:
                    own.append(float(document_losses(model, ids)[place - 1]))
            expected += own
            (answer,) = (a for a in fields["answers"] if (a.index, a.part) == (index, "key tokens"))
            assert answer.score == pytest.approx(sum(own) / len(own), rel=1e-6)
        assert 0 < fields["values"]["key_tokens"] == len(expected) < 160
        assert fields["values"]["key_token_loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)
