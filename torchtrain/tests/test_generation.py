"""Answers and losses: each beside its slow twin."""

import json
import random

import pytest
import torch
from tokenizers import processors
from transformers.cache_utils import DynamicLayer

from anchorline.errors import UserError
from torchtrain.evaluation.evaluate import _may_know
from torchtrain.evaluation.generation import Generator
from torchtrain.evaluation.perplexity import (
    bucket_means,
    buckets,
    check_logits,
    document_losses,
    long_documents,
    strided_loss,
    token_losses,
)
from torchtrain.evaluation.results import (
    Training,
)
from torchtrain.evaluation.suite import PerplexityConfig
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


@pytest.mark.parametrize("batch_tokens", [1, 200, 100_000])
def test_answers_are_those_of_each_prompt_alone(model, alone, batch_tokens):
    prompts, work = _prompts(), []
    found = Generator(model, batch_tokens, [END]).answers(prompts, ROOM, lambda done, of: work.append((done, of)))
    assert found == alone
    assert len({tuple(answer) for answer in found}) == len(prompts) - 1  # only the copies agree
    assert work[-1][0] == len(prompts)
    assert sum(of.prompt_tokens for _, of in work) == sum(map(len, prompts))
    if batch_tokens in (1, 100_000):  # what is computed is the tree of all prompts, and of a copy its last token again
        tree = {tuple(prompt[:i]) for prompt in prompts for i in range(1, len(prompt) + 1)}
        assert sum(of.computed_tokens for _, of in work) == len(tree) + 1


@pytest.mark.parametrize("batch_tokens", [1, 100_000])
def test_a_token_of_an_answer_copies_no_keys(model, monkeypatch, batch_tokens):
    """transformers' own layer makes all keys anew for each token: 16 GiB of an 8B model at 128K."""
    calls, update = [], DynamicLayer.update
    monkeypatch.setattr(DynamicLayer, "update", lambda *args: calls.append(1) or update(*args))
    assert all(Generator(model, batch_tokens, []).answers(_prompts(), ROOM))
    reads = 0 if batch_tokens == 1 else len(_prompts())  # of one batch, each of which is kept
    assert len(calls) == reads * model.config.num_hidden_layers


def test_an_answer_ends_where_the_model_ends_it(model):
    prompts = _prompts()
    free = Generator(model, 100_000, []).answers(prompts, ROOM)
    stop = free[0][3]
    ended = Generator(model, 100_000, [stop]).answers(prompts, ROOM)
    assert ended == [answer[: answer.index(stop)] if stop in answer else answer for answer in free]
    assert [len(answer) for answer in Generator(model, 100_000, []).answers(prompts, 1)] == [1] * len(prompts)


def test_a_model_with_a_window_answers_each_prompt_alone():
    model = tiny_model("mistral", sliding_window=16, max_position_embeddings=256).eval()
    generator = Generator(model, 100_000, [END])
    assert not generator.shares_prefixes
    assert generator.answers(_prompts(), ROOM) == _alone(model, _prompts())


def test_losses_in_parts_of_the_vocabulary_are_the_models(model, monkeypatch):
    monkeypatch.setattr("torchtrain.evaluation.perplexity._TOKENS", 7)
    ids = _prompts()[0]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    truth = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    own = document_losses(model, ids)
    hidden, head = torch.randn(5, 32), model.get_output_embeddings()
    whole = token_losses(hidden, head, torch.arange(5), 10_000)
    for vocabulary in (1, 7, 263, 264):
        # float32: a rounding of a sum of exponentials for each part
        assert torch.allclose(token_losses(hidden, head, torch.arange(5), vocabulary), whole, atol=264 * 2**-23)
    assert torch.allclose(own.double(), truth, atol=64 * 2**-23 * truth.abs().max())
    assert sum(map(len, [own])) == len(ids) - 1


def test_perplexity_says_that_a_run_was_trained_on_its_source():
    training = Training(
        model="m", variant="anchor", sequence_length=8, rope={}, steps=1, sequences_per_step=1,
        data={"sources": [{"demo": "speeches", "share": 1.0}]},
    )  # fmt: skip
    speeches = PerplexityConfig.model_validate({"source": {"demo": "speeches"}})
    assert _may_know(training, speeches) == ", which the run was trained on"
    assert _may_know(training, PerplexityConfig.model_validate({"source": {"demo": "code"}})) == ""
    assert _may_know(None, speeches) == ""


def test_buckets_hold_every_position_once():
    for length in (128, 256, 257, 1000, 4096):
        held = [position for first, end in buckets(length) for position in range(first, end)]
        assert held == list(range(1, length))
    losses = torch.arange(1.0, 1000.0)
    means = list(bucket_means(losses, 1000))
    total = sum(mean * (end - first) for mean, (first, end) in zip(means, buckets(1000), strict=True))
    assert total == pytest.approx(float(losses.sum()))


@pytest.mark.parametrize(("window", "stride"), [(20, 5), (20, 19), (16, 7), (70, 3), (69, 1)])
def test_windows_take_each_token_once_with_all_that_they_hold(model, window, stride):
    ids = _prompts()[0]
    expected, seen = [], 1
    for first in range(0, len(ids), stride):
        part = ids[first : first + window]
        with torch.no_grad():
            logits = model(torch.tensor([part])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none").tolist()
        end = first + len(part)
        expected += losses[-(end - seen) :] if end > seen else []
        seen = max(seen, end)
        if end == len(ids):
            break
    total, tokens = strided_loss(model, ids, window, stride)
    assert tokens == len(expected) == len(ids) - 1
    assert total == pytest.approx(sum(expected), rel=1e-5)


def test_a_model_that_caps_its_logits_has_no_perplexity_here(model):
    check_logits(model)
    forward = model.forward
    try:
        model.forward = lambda **inputs: type("Out", (), {"logits": forward(**inputs).logits.tanh()})
        with pytest.raises(UserError, match="scales or caps its logits"):
            check_logits(model)
    finally:
        model.forward = forward


@pytest.mark.parametrize("worst", [torch.nan, torch.inf])
def test_a_model_that_diverged_is_told_whatever_it_is_asked(worst):
    diverged = tiny_model("qwen3", max_position_embeddings=256).eval()
    with torch.no_grad():
        diverged.lm_head.weight[7] = worst  # inf times a negative is -inf, beside NaN by 0 and inf
    prompts = [[1, 2, 3], [4, 5], [6] * 30, [9, 8], [7, 7, 7]]
    asked = (
        lambda: Generator(diverged, 100_000, []).answers(prompts, 4),
        lambda: Generator(diverged, 1, []).answers(prompts, 4),
        lambda: Generator(diverged, 1, []).log_likelihoods([(prompt, [1]) for prompt in prompts]),
        lambda: document_losses(diverged, list(range(60))),
        lambda: check_logits(diverged),
    )
    for ask in asked:
        with pytest.raises(UserError, match="its logits are not finite; the checkpoint has diverged") as raised:
            ask()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize("batch_tokens", [1, 100_000])
def test_a_model_that_diverges_within_its_answer_is_told(batch_tokens):
    diverged = tiny_model("qwen3", max_position_embeddings=256).eval()
    prompts = [[1, 2, 3], [4, 5]]
    firsts = {answer[0] for answer in Generator(diverged, 1, []).answers(prompts, 1)}
    assert not firsts & {1, 2, 3, 4, 5}
    with torch.no_grad():
        diverged.model.embed_tokens.weight[sorted(firsts)] = torch.nan  # read from the second token on
    with pytest.raises(UserError, match="its logits are not finite"):
        Generator(diverged, batch_tokens, []).answers(prompts, 3)


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
