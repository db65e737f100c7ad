"""The plug-in for transformers: every family, every engine, in anybody's training loop; and what it refuses."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import torchtrain
from torchtrain.attention import hf, make_plan, visible_BTT
from torchtrain.attention.plan import AttentionPlan
from torchtrain.config import BASE_VARIANTS, PackConfig
from torchtrain.data import stack_rows
from torchtrain.data.rows import SpanTokens, build_row
from torchtrain.tests.flash_on_cpu import FlashOnCPU
from torchtrain.tests.layouts import NAMED_ROWS, named_batch
from torchtrain.tests.tiny import FAMILIES, refused, tiny_config

SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False}
ENGINES = ["anchor", "anchor_segments", "anchor_dense", "anchor_varlen"]


@pytest.fixture(scope="module", autouse=True)
def _registered():
    torchtrain.register()
    with FlashOnCPU():
        yield


def tiny(family: str = "llama", implementation: str = "anchor", **changes) -> nn.Module:
    torch.manual_seed(0)
    config = tiny_config(family, **(SMALL | changes))
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float64)


def inputs(ids_BT: torch.Tensor) -> dict[str, torch.Tensor]:
    B, T = ids_BT.shape
    tokens = torch.randint(0, 61, (B, T), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.arange(T).expand(B, T), "document_ids": ids_BT}


def assert_nothing_leaks(model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """The gradient of every token's logits reaches exactly the tokens it may see, and itself."""
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    others = {name: batch[name] for name in ("position_ids", "document_ids")}
    logits = model(inputs_embeds=embeds, **others).logits
    rule = visible_BTT(batch["document_ids"])
    weight = torch.randn(logits[:, 0].shape, device=logits.device, dtype=logits.dtype)
    for query in range(logits.shape[1]):
        (grad,) = torch.autograd.grad((logits[:, query] * weight).sum(), embeds, retain_graph=True)
        reached = grad.abs().sum(-1) > 0
        sees_itself = (
            torch.arange(logits.shape[1], device=logits.device) == query
        )  # padding too: through the residual stream, not attention
        assert torch.equal(reached, rule[:, query] | sees_itself)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("implementation", ENGINES)
def test_no_gradient_reaches_an_invisible_token_through_the_whole_model(family, implementation):
    names = ("anchor", "intra", "full", "padding in the middle", "documents apart")
    assert_nothing_leaks(tiny(family, implementation), inputs(torch.tensor([NAMED_ROWS[name] for name in names])))


@pytest.mark.parametrize("variant", [base + extra for base in BASE_VARIANTS for extra in ("+tag", "+tag+interleave")])
def test_nothing_leaks_in_rows_the_packer_makes(variant):
    pack = PackConfig(sequence_length=18, variant=variant, chunks=3)
    tag = [7, 8] if pack.tag else []
    random = np.random.default_rng(0)
    rows = [
        build_row([SpanTokens(random.integers(9, 61, n), 0, tag) for n in lengths], pack, [1], 2, random)
        for lengths in ((5, 1, 4), (9,))
    ]
    assert_nothing_leaks(tiny("llama"), stack_rows(rows))


def test_nothing_invisible_moves_a_flex_forward_pass():
    """Off CUDA `flex` has no gradients to look at: other tokens in one document leave every other document's bits
    alone.
    """
    model, batch = (
        tiny(implementation="anchor_flex").float(),
        inputs(torch.tensor([[0, 1, 1, 1, 2, 2, 2, 2, 3, 3, -1, -1]])),
    )
    with torch.no_grad():
        before = model(**batch).logits
        changed = batch["document_ids"] == 2
        batch["input_ids"] = torch.where(changed, (batch["input_ids"] + 1) % 61, batch["input_ids"])
        after = model(**batch).logits
    moved = (before != after).any(-1)
    assert not moved[~changed].any()
    assert moved[changed].all()


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["anchor_varlen", "anchor_flex", "anchor_segments"])
def test_nothing_leaks_on_a_gpu(implementation):
    model = tiny("llama", implementation, head_dim=16).to("cuda", torch.bfloat16)
    ids_BT = torch.tensor([NAMED_ROWS[name] for name in ("anchor", "intra", "full", "padding in the middle")])
    assert_nothing_leaks(model, {name: x.cuda() for name, x in inputs(ids_BT).items()})


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant):
    model, batch = tiny().train(), inputs(named_batch())

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(**batch, use_cache=False).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert all(torch.equal(a, b) for a, b in zip(plain, gradients(), strict=True))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_plan_is_built_once_per_batch_and_anew_for_changed_ids(monkeypatch, mode):
    built = []
    monkeypatch.setattr(hf, "make_plan", lambda ids: built.append(make_plan(ids)) or built[-1])
    model = tiny(num_hidden_layers=3)
    with mode():
        assert_one_plan_a_batch(model, built)


def assert_one_plan_a_batch(model, built):
    batch = inputs(named_batch())
    batch["document_ids"] = batch["document_ids"].clone()
    first = model(**batch).logits
    assert len(built) == 1
    assert torch.equal(model(**batch).logits, first)
    assert len(built) == 1
    batch["document_ids"][batch["document_ids"] == 0] = 1  # in place: the same tensor, other documents
    assert not torch.equal(model(**batch).logits, first)
    assert len(built) == 2


def test_a_plan_given_by_the_caller_is_used_as_it_is():
    model, batch = tiny(), inputs(named_batch())
    plan: AttentionPlan = make_plan(batch["document_ids"])
    assert torch.equal(model(**batch, plan=plan).logits, model(**batch).logits)
    del batch["document_ids"]
    assert model(**batch, plan=plan).logits.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float64])
def test_a_padding_mask_is_taken_only_if_it_hides_nothing(dtype):
    model, batch, mask = tiny(), inputs(named_batch()), torch.ones(11, 12, dtype=dtype)
    assert torch.equal(model(**batch, attention_mask=mask).logits, model(**batch).logits)
    mask[3, 0] = 0  # in place: what was remembered of it no longer holds
    assert refused(lambda: model(**batch, attention_mask=mask)).startswith("attention_mask")
    longer = torch.ones(11, 13, dtype=dtype)
    assert refused(lambda: model(**batch, attention_mask=longer)).startswith("attention_mask")


def test_decoding_from_a_cache_is_refused():
    model, batch = tiny(), inputs(named_batch())
    cache = model(**batch, use_cache=True).past_key_values
    step = {name: x[:, -1:] for name, x in batch.items()}
    assert refused(lambda: model(**step, past_key_values=cache)).startswith("past_key_values")


@pytest.mark.parametrize(
    ("implementation", "reentrant"),
    [("anchor", False), ("anchor", True), ("anchor_varlen", None), ("anchor_dense", None)],
)
def test_a_sliding_window_hides_what_the_rule_hides(implementation, reentrant):
    """Of a model of one layer, whose last query is moved by what it sees and by nothing else."""
    config = tiny_config("mistral", **SMALL, num_hidden_layers=1, sliding_window=3)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float64)
    if reentrant is not None:
        model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
    batch = inputs(named_batch())
    embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
    model(inputs_embeds=embeds, **batch, use_cache=False).logits[:, -1].square().sum().backward()
    seen = visible_BTT(batch["document_ids"], 3)[:, -1]
    seen[:, -1] = True
    assert torch.equal(embeds.grad.any(-1), seen)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"document_ids": None}, "document_ids: missing"),
        ({"document_ids": named_batch().tolist()}, "document_ids: a list"),
        ({"document_ids": named_batch()[:1]}, "document_ids: shape [1, 12]"),
        ({"attention_mask": torch.zeros(11, 1, 12, 12, dtype=torch.float64)}, "attention_mask"),
        ({"sliding_window": 5}, "sliding_window: 5 for the"),
        ({"head_mask": torch.ones(4)}, "head_mask"),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, "cu_seq_lens_q"),
        ({"output_attentions": True}, "output_attentions"),
    ],
)
def test_what_no_engine_honours_is_refused(changes, said):
    assert refused(lambda: tiny()(**inputs(named_batch()) | changes)).startswith(said)
