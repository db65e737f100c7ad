"""Families with layers that carry a state from token to token: each document is what it is alone behind the anchor."""

import copy
from functools import partial

import pytest
import torch

import torchtrain
from anchorline.errors import UserError
from anchorline.tolerance import judge
from parity_tests import families
from parity_tests.zoo import discover
from torchtrain.attention.recurrent import MIXERS, is_mixer

BUGS = discover()
HYBRIDS = (
    *("bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "nemotron_h"),
    *("qwen3_5_text", "qwen3_next"),
)
IDS = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 2, 2, 2, -1, -1], [1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3]])
BATCH = families.packed_rows() | {"document_ids": IDS}


@torch.no_grad()
def each_alone(model) -> torch.Tensor:
    return families.each_document_alone(model, BATCH, {"use_cache": False})[0].to(model.dtype)  # Nemotron-H: float32


def gradients(model) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.train()(**BATCH, use_cache=False).logits.square().sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", HYBRIDS)
def test_each_document_is_what_it_is_alone_behind_the_anchor(family):
    model = families.tiny_model(family)
    truth = each_alone(model)
    reference = each_alone(copy.deepcopy(model).float()).double()
    torchtrain.attach(model)
    assert any(is_mixer(module) for module in model.modules())

    # Logits, and exact zeros from each document to all others.
    embeds = model.get_input_embeddings()(BATCH["input_ids"]).detach().requires_grad_()
    rest = {name: BATCH[name] for name in ("position_ids", "document_ids")}
    logits = model(inputs_embeds=embeds.clone(), **rest, use_cache=False).logits
    verdict = judge(logits.detach().double() * (IDS != -1)[..., None], truth, reference, "float32")
    assert verdict.passed, verdict
    for document in (0, 1, 2, 3):
        own = document == IDS
        (gradient,) = torch.autograd.grad(logits[own].square().sum(), embeds, retain_graph=True)
        assert not gradient[~(own | (IDS == 0))].any()
        assert gradient[own].any()
        assert document == 3 or gradient[0, :2].any()

    # What is computed again in the backward pass is told the same documents.
    before = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    after = gradients(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_hybrid_in_bfloat16_on_a_gpu(family):
    """By the kernels that are installed there. No gradient reaches another document."""
    ids_BT = torch.tensor([[0] * 2 + [1] * 300 + [2] * 1 + [3] * 500 + [-1] * 9, [1] * 130 + [2] * 682])
    tokens_BT = torch.randint(2, 32, ids_BT.shape, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens_BT, "position_ids": torch.arange(812).expand(2, 812), "document_ids": ids_BT}
    model = families.tiny_model(family).bfloat16()
    alone = partial(families.each_document_alone, options={"use_cache": False})
    with torch.no_grad():  # truth by plain torch: Triton's kernels have no float64
        truth = alone(copy.deepcopy(model).double(), batch)[0].numpy()
        batch = {name: x.cuda() for name, x in batch.items()}
        reference = alone(model.cuda(), batch)[0].double().cpu().numpy()
    torchtrain.attach(model)
    ids_BT = batch["document_ids"]
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    rest = {name: batch[name] for name in ("position_ids", "document_ids")}
    logits = model(inputs_embeds=embeds.clone(), **rest, use_cache=False).logits
    found = (logits.detach().double() * (ids_BT != -1)[..., None]).cpu().numpy()
    verdict = judge(found, truth, reference, "bfloat16")
    assert verdict.passed, verdict
    for document in (1, 2, 3):
        own = ids_BT == document
        (gradient,) = torch.autograd.grad(logits[own].float().square().sum(), embeds, retain_graph=True)
        assert not gradient[~(own | (ids_BT == 0))].any()
        assert gradient[own].any()


@pytest.mark.parametrize("bug", ["state_leaked", "state_reset_twice", "state_without_anchor"])
def test_a_wrong_state_is_seen(bug):
    model = torchtrain.attach(families.tiny_model("lfm2_moe"))
    truth = families.logits_and_gradients(model, "eager", BATCH, backward=False)["logits"]
    rounded = families.logits_and_gradients(model.float(), "eager", BATCH, backward=False)["logits"]
    model.double()

    def passes() -> bool:
        logits = families.logits_and_gradients(model, "anchor", BATCH, backward=False)["logits"]
        return judge(logits * (IDS != -1)[..., None], truth, rounded.double(), "float32").passed

    with BUGS[bug].apply():
        assert not passes()
    assert passes()


def test_what_a_layer_with_a_state_refuses():
    model = torchtrain.attach(families.tiny_model("lfm2_moe"))
    with pytest.raises(UserError, match="past_key_values: `anchor` has no KV cache: pass use_cache=False"):
        model(**BATCH, use_cache=True)
    with pytest.raises(UserError, match="seq_idx: not honoured by `anchor`"):
        model(**BATCH, use_cache=False, seq_idx=IDS)
    model.set_attn_implementation("sdpa")  # as transformers computes it: no documents, and a cache
    assert model(BATCH["input_ids"], use_cache=True).past_key_values is not None


def test_a_refused_model_is_left_as_it_was(monkeypatch):
    model = families.tiny_model("lfm2_moe")
    monkeypatch.setattr("torchtrain.attention.recurrent.MIXERS", MIXERS - {"Lfm2MoeShortConv"})
    with pytest.raises(UserError, match=r"\(Lfm2MoeShortConv\): carries one document into another"):
        torchtrain.attach(model)
    monkeypatch.undo()
    assert not any(is_mixer(module) for module in model.modules())
    model.set_attn_implementation("anchor")
    with pytest.raises(UserError, match=r"layers.0: conv .* call torchtrain.attach"):
        model(**BATCH, use_cache=False)


@pytest.mark.parametrize("family", ["nemotron", "stablelm"])
def test_a_family_that_drops_document_ids_is_given_them(family):
    model = torchtrain.attach(families.tiny_model(family))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert families.find_fault(model.train()) == ""


def test_what_a_model_that_runs_a_document_at_a_time_refuses():
    model = families.tiny_model("mamba")
    with pytest.raises(UserError, match=r'or run each document alone: attach\(model, engine="documents"\)'):
        torchtrain.attach(model)
    with pytest.raises(UserError, match="keep_anchor: engine documents"):
        torchtrain.attach(model, "documents", keep_anchor=True)
    torchtrain.attach(model, "documents")
    for more, message in (
        ({"use_cache": True}, "use_cache: engine documents"),
        ({"attention_mask": (IDS > 0).long()}, "attention_mask: not honoured"),
        ({"document_ids": torch.full_like(IDS, -1)}, "document_ids: all are padding"),
    ):
        with pytest.raises(UserError, match=message):
            model(**BATCH | {"use_cache": False} | more)
