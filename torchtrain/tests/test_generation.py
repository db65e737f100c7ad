"""Answers and losses: each beside its slow twin."""

import json
import random

import pytest
import torch
from tokenizers import processors

from anchorline.errors import UserError
from torchtrain.evaluation.model import SharedPrefixLM
from torchtrain.evaluation.perplexity import (
    document_losses,
    long_documents,
)
from torchtrain.evaluation.suite import PerplexityConfig
from torchtrain.evaluation.tasks.materials import quiet_library
from torchtrain.tests.tiny import tiny_model, tiny_tokenizer

ROOM, END = 12, 257


def _prompts() -> list[list[int]]:
    """Prompts that share starts of several lengths: a copy, a prefix of another, one of one token, none in common."""
    draw = random.Random(0)
    base = [draw.randrange(256) for _ in range(60)]
    cuts = [(50, 20), (60, 3), (0, 7), (60, 1), (50, 15), (59, 0), (0, 1)]
    prompts = [base[:shared] + [draw.randrange(256) for _ in range(own)] for shared, own in cuts]
    return [*prompts, list(prompts[0])]


@pytest.fixture(scope="module")
def model():
    return tiny_model("qwen3", max_position_embeddings=256).eval()


def _alone(model, prompts) -> list[list[int]]:
    """Each prompt alone, by transformers' own generation."""
    found = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=ROOM, do_sample=False, eos_token_id=END, pad_token_id=258
        )
        found.append([token for token in ids[0, len(prompt) :].tolist() if token != END])
    return found


@pytest.fixture(scope="module")
def alone(model) -> list[list[int]]:
    return _alone(model, _prompts())


def _lm(model, batch_tokens=100_000, **more) -> SharedPrefixLM:
    with quiet_library():
        return SharedPrefixLM(model, tiny_tokenizer(), batch_tokens, 256, **more)


def _answers(model, prompts, batch_tokens=100_000, room=ROOM, **more) -> list[list[int]]:
    found = {}
    for batch, said in _lm(model, batch_tokens, **more).answers(prompts, room):
        found |= dict(zip(batch, said, strict=True))
    return [found[i] for i in range(len(prompts))]


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_answers_are_those_of_each_prompt_alone(model, alone, batch_tokens):
    prompts = _prompts()
    lm, found = _lm(model, batch_tokens), {}
    for batch, said in lm.answers(prompts, ROOM):
        found |= dict(zip(batch, said, strict=True))
    assert [found[i] for i in range(len(prompts))] == alone
    assert len({tuple(answer) for answer in alone}) == len(prompts) - 1  # only the copies agree
    # What is computed is the tree of all prompts, and of a copy its last token again.
    tree = {tuple(prompt[:i]) for prompt in prompts for i in range(1, len(prompt) + 1)}
    assert (lm.prompt_tokens, lm.computed_tokens) == (sum(map(len, prompts)), len(tree) + 1)


def test_an_answer_ends_where_the_model_ends_it(model, alone, monkeypatch):
    stop = alone[0][3]
    monkeypatch.setattr(model.generation_config, "eos_token_id", [stop, END])
    assert _answers(model, _prompts()) == [a[: a.index(stop)] if stop in a else a for a in alone]
    assert [len(answer) for answer in _answers(model, _prompts(), room=1)] == [0 if a[0] == stop else 1 for a in alone]


def test_lm_evals_requests_are_answered_as_by_its_own_class(model):
    """Texts that end an answer, prompts that are cut, likelihoods: against HFLM's own."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    texts = ["abc defg", "abc dxy", "q", "a" * 260]
    with quiet_library():
        stock, lm = HFLM(pretrained=model, tokenizer=tiny_tokenizer(), max_length=256), _lm(model)
        free = stock.generate_until(
            [Instance("generate_until", {}, (t, {"until": [], "max_gen_toks": 8}), i) for i, t in enumerate(texts)]
        )
        until = next(c for c in free[0][1:] if c.strip())
        for settings in ({"until": [], "max_gen_toks": 8}, {"until": [until], "max_gen_toks": 8}):
            requests = [Instance("generate_until", {}, (t, dict(settings)), i) for i, t in enumerate(texts)]
            assert lm.generate_until(requests) == stock.generate_until(requests)
        assert lm.cut_prompts == 2  # one, asked twice
        lm.set_length(256, cut_middle=True)
        long = [Instance("generate_until", {}, ("a" * 150 + "b" * 150, {"until": [], "max_gen_toks": 56}), 0)]
        short = [Instance("generate_until", {}, ("a" * 100 + "b" * 100, {"until": [], "max_gen_toks": 56}), 0)]
        assert lm.generate_until(long) == stock.generate_until(short)
        pairs = [Instance("loglikelihood", {}, (t, " next"), i) for i, t in enumerate(texts[:3])]
        found = zip(lm.loglikelihood(pairs), stock.loglikelihood(pairs), strict=True)
        assert [a == pytest.approx(b, abs=1e-4) for a, b in found] == [True] * 3  # other batches


def test_an_anchor_is_put_before_prompts_that_have_none(model):
    lm, plain = _lm(model, anchor=[256]), tiny_tokenizer()("ab").input_ids
    assert lm.tok_encode("ab") == lm.tok_encode("<s>ab") == [256, *plain]
    assert lm.tok_encode("ab", add_special_tokens=False) == plain


def test_a_model_with_a_window_answers_each_prompt_alone():
    model = tiny_model("mistral", sliding_window=16, max_position_embeddings=256).eval()
    assert not _lm(model).shares_prefixes
    assert _answers(model, _prompts()) == _alone(model, _prompts())


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_losses_are_the_models_whatever_it_does_to_its_logits(model, monkeypatch, scale):
    """Read in parts, with logits scaled as Granite and Cohere do."""
    monkeypatch.setattr("torchtrain.evaluation.perplexity._TOKENS", 14)
    monkeypatch.setattr("torchtrain.evaluation.perplexity._LOGITS", 5)
    ids, forward = _prompts()[0], model.forward

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
    prompts = [[1, 2, 3], [4, 5], [6] * 30, [9, 8], [7, 7, 7]]
    asked = (
        lambda: _answers(diverged, prompts),
        lambda: _answers(diverged, prompts, 1),
        lambda: _lm(diverged)._loglikelihood_tokens([(("a", "b"), prompt, [1]) for prompt in prompts]),
        lambda: document_losses(diverged, list(range(60))),
    )
    for ask in asked:
        with pytest.raises(UserError, match="its logits are not finite; the checkpoint has diverged"):
            ask()
    within = tiny_model("qwen3", max_position_embeddings=256).eval()  # finite for the first token of an answer
    firsts = {answer[0] for answer in _answers(within, prompts, room=1)}
    with torch.no_grad():
        within.model.embed_tokens.weight[sorted(firsts - {1, 2, 3, 4, 5, 6, 7, 8, 9})] = torch.nan
    with pytest.raises(UserError, match="its logits are not finite"):
        _answers(within, prompts, room=3)


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
