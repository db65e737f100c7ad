"""The way in: what `attach` checks, what it refuses by name, and that it leaves a model as it was."""

import inspect
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch._dynamo.backends.registry import lookup_backend
from transformers import AutoModelForCausalLM
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import torchtrain
from anchorline.errors import UserError
from torchtrain.attention import attach as attach_module
from torchtrain.attention import hf, visible_BTT
from torchtrain.attention.masks import MASKS_TOLD, MASKS_WITH_A_LENGTH, functions_by_length, functions_in
from torchtrain.tests.tiny import refused, tiny_model

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def tiny(family: str = "llama", **changes) -> nn.Module:
    torch.manual_seed(0)
    known = inspect.signature(CONFIG_MAPPING[family]).parameters
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**(sizes | changes)))


def batch(T: int = 12) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 61, (1, T), generator=torch.Generator().manual_seed(1))
    position_ids = torch.arange(T)[None]
    return {"input_ids": tokens, "position_ids": position_ids, "document_ids": position_ids // (T // 2) + 1}


class Shifted(nn.Module):
    """A layer that carries each token into the next."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


class WithBigrams(nn.Embedding):
    """An embedding that looks up two tokens at once."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.bigrams = nn.Embedding(rows, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        pairs = (ids + torch.nn.functional.pad(ids, (1, 0))[:, :-1]) % self.num_embeddings
        return super().forward(ids) + self.bigrams(pairs)


def test_it_says_in_one_line_what_runs(caplog):
    model = tiny()
    with caplog.at_level("INFO", logger="torchtrain"):
        assert torchtrain.attach(model) is model
        model(**batch())
    said = [record.getMessage() for record in caplog.records]
    assert said == ["attached: LlamaForCausalLM, attention sdpa on cpu in torch.float32, documents are separate"]
    assert model.config._attn_implementation == "anchor"


def with_labels(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    ids, targets = inputs["document_ids"], inputs["input_ids"].roll(-1, 1)
    targets = targets.masked_fill(ids != ids.roll(-1, 1), -100)
    targets[:, -1] = -100
    return inputs | {"shift_labels": targets, "labels": targets, "use_cache": False}


def gradients(model: nn.Module, call, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    loss = call(**inputs).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def compiled(model: nn.Module):
    """Return what calls a model in one graph, and a list of the graphs."""
    torch.compiler.reset()
    graphs, backend = [], lookup_backend("aot_eager")

    def keep(graph, inputs):
        graphs.append(graph)
        return backend(graph, inputs)

    return torch.compile(lambda **inputs: model(**inputs), fullgraph=True, backend=keep), graphs


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"num_hidden_layers": 2}),
        (
            "gpt_oss",
            {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "sliding_window": 4}
            | {"num_hidden_layers": 1},
        ),
    ],
)
def test_torch_compile_makes_one_graph_that_computes_the_same(family, changes, monkeypatch):
    """And it plans once a batch, for all layers and the backward pass."""
    model = torchtrain.attach(tiny(family, **changes))
    call, graphs = compiled(model)
    planned = Mock(side_effect=hf.make_plan)
    monkeypatch.setattr(hf, "make_plan", planned)
    for ids in ([0] + [1] * 4 + [2] * 7, [1] * 3 + [2] * 8 + [-1]):  # other documents, the same graph
        inputs = with_labels(batch() | {"document_ids": torch.tensor([ids])})
        planned.reset_mock()
        mine = gradients(model, call, inputs)
        assert planned.call_count == 1
        theirs = gradients(model, model, inputs)
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    assert len(graphs) == 1
    with pytest.raises(UserError, match="document_ids: smallest value -3"):
        call(**inputs | {"document_ids": inputs["document_ids"] - 2})


def test_a_mask_whose_closure_torch_compile_does_not_show_is_known_by_its_length():
    chunked, windowed = chunked_causal_mask_function(4, torch.zeros(1)), sliding_window_causal_mask_function(3)
    config = SimpleNamespace(sliding_window=3, attention_chunk_size=4)
    for function, length, overlay in ((chunked, 4, "chunked_overlay"), (windowed, 3, "sliding_window_overlay")):
        assert overlay in functions_by_length(function, config, length) & functions_in(function)
    assert functions_by_length(causal_mask_function, config, None) == functions_in(causal_mask_function)
    assert not functions_by_length(windowed, config, 5) <= {*MASKS_TOLD, *MASKS_WITH_A_LENGTH}


def test_the_checks_of_a_graph_are_those_of_a_model_without_one(caplog):
    """As the operations that a graph holds, without compiling one."""
    read, check_masks, check = (
        getattr(torch.ops.anchorline, x) for x in ("read_positions", "check_masks", "check_labels")
    )
    inputs = with_labels(batch())
    ids, tokens, targets = (inputs[name] for name in ("document_ids", "input_ids", "labels"))
    assert torch.equal(check_masks(ids, torch.ones(1, 12), 12, None, None), ids)
    flat = torch.tensor([[0, 1, 2, 0, 1]])
    attach_module._told.cache_clear()
    read_ids = read(flat, torch.tensor([0, 3, 5]), None, None)
    assert read_ids.tolist() == [[1, 1, 1, 2, 2]]
    assert "there is no anchor" in caplog.text
    check_masks(read_ids, None, 5, flat, 2)
    assert "torchtrain.extend(config, 5)" in caplog.text
    assert refused(lambda: read(flat, torch.tensor([0, 2, 5]), None, None)).startswith(
        "cu_seq_lens_q: begins documents"
    )
    assert refused(lambda: check_masks(ids, ids - 1, 12, None, None)).startswith("attention_mask: not honoured")
    assert torch.equal(check(tokens, None, targets, ids), targets)
    assert refused(lambda: check(tokens, None, tokens, ids)).startswith("shift_labels: each is its own token")
    assert refused(lambda: check(tokens, tokens, None, ids)).startswith(
        "labels: transformers shifts them over the ends"
    )
    assert refused(lambda: check(tokens, targets, None, ids)).startswith("labels: each is already the next token")


def test_a_length_that_it_could_not_see_is_told(caplog):
    torchtrain.attach(tiny("llama4_text", num_local_experts=2, intermediate_size_mlp=48, head_dim=8))
    assert "a row of more than 8,192 tokens is refused (attention_chunk_size)" in caplog.text


@pytest.mark.parametrize("keep_anchor", [False, True])
def test_a_window_is_told_and_hides_the_anchor_unless_it_is_kept(keep_anchor, caplog):
    model = tiny("mistral", sliding_window=3, num_hidden_layers=1)
    torchtrain.attach(model, "dense", keep_anchor=keep_anchor)
    assert "some layers see 3 tokens of a document (sliding_window)" in caplog.text
    inputs = batch() | {"document_ids": torch.tensor([[0] + [1] * 11])}
    embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    model(inputs_embeds=embeds, **inputs, use_cache=False).logits[:, -1].square().sum().backward()
    assert embeds.grad.any(-1)[0].nonzero().flatten().tolist() == [*([0] if keep_anchor else []), 9, 10, 11]


@pytest.mark.parametrize("leaks", [False, True])
def test_the_model_is_left_as_it_was(leaks):
    model = tiny().train()
    model.model.layers[0].eval()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    if leaks:
        model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    model.lm_head.weight.requires_grad_(False)
    model.model.norm.weight.grad = torch.ones(32)

    def state():
        return (
            torch.get_rng_state().tolist(),
            {name: module.training for name, module in model.named_modules()},
            {name: (p.requires_grad, p.grad is None) for name, p in model.named_parameters()},
            sum(len(m._forward_hooks) for m in model.modules()),
            model.config.use_cache,
        )

    before = state()
    if leaks:
        refused(lambda: torchtrain.attach(model))
        assert model.config._attn_implementation == "sdpa"
        assert not model._forward_pre_hooks
    else:
        torchtrain.attach(torchtrain.attach(model))
        assert (len(model._forward_pre_hooks), len(model.model._forward_pre_hooks)) == (2, 2)
    assert state() == before


def leaky(frozen: bool) -> nn.Module:
    model = tiny().requires_grad_(not frozen)
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    return model


def with_bigrams() -> nn.Module:
    model = tiny()
    model.model.embed_tokens = WithBigrams(61, 32)
    return model


def blind() -> nn.Module:
    model = tiny()
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    return model


def test_an_engine_by_name_or_one_that_caps_logits(caplog):
    assert torchtrain.attach(tiny(), "dense").config._attn_implementation == "anchor_dense"
    torchtrain.attach(tiny("gemma2", head_dim=8))
    assert "attached: Gemma2ForCausalLM, attention dense on cpu" in caplog.text


@pytest.mark.parametrize(
    ("make", "engine", "said"),
    [
        (lambda: leaky(frozen=False), "auto", "model.layers.1.mlp (Shifted): carries one document into"),
        (lambda: leaky(frozen=True), "auto", "model.layers.1.mlp (Shifted): carries one document into"),
        (lambda: tiny("mamba"), "auto", "backbone.layers.0.mixer (MambaMixer): carries one document into another"),
        (with_bigrams, "auto", "model.embed_tokens.bigrams: looks up several tokens"),
        (blind, "auto", "sees no other token of its own document"),
        (lambda: tiny("falcon"), "auto", "attach: FalconForCausalLM computes attention in its own way"),
        (lambda: tiny(attention_dropout=0.1).eval(), "auto", "attention_dropout: 0.1"),
        (lambda: nn.Linear(2, 2), "auto", "is not a causal language model of transformers"),
        (lambda: nn.DataParallel(nn.Linear(2, 2)), "auto", "is not a causal language model of transformers"),
        (lambda: tiny().to("meta"), "auto", "the model is on the device meta"),
        (tiny, "fast", "attention 'fast': unknown engine"),
        (tiny, None, "attention None: unknown engine"),
        (tiny, "flex", "no backward pass on cpu"),
        (lambda: tiny("gemma2", head_dim=8), "sdpa", "sdpa: does not cap logits"),
    ],
)
def test_what_it_refuses_is_named(make, engine, said):
    assert said in refused(lambda: torchtrain.attach(make(), engine))


def test_a_hybrid_is_refused_at_the_first_call_without_attach():
    model = tiny("lfm2", layer_types=["conv", "full_attention"])
    torchtrain.register()
    model.set_attn_implementation("anchor")
    said = refused(lambda: model(**batch(), use_cache=False))
    assert said.startswith("layers.0: conv by config.layer_types, which can carry one document into another;")
    assert said.endswith("call torchtrain.attach(model)")
    torchtrain.attach(model)(**batch(), use_cache=False)


def give_theta(model, kind=None):
    parameters = model.config.rope_parameters
    (parameters if kind is None else parameters[kind])["rope_theta"] *= 2


def replace_config(model):
    model.config = torchtrain.extend(model.config, 128)


YARN = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.5}}
LONG = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("family", "changes", "change", "refusal"),
    [
        ("llama", {}, give_theta, "model.rotary_emb.inv_freq: not what model.config.rope_parameters make"),
        ("llama", {}, replace_config, "model.rotary_emb.inv_freq: not what"),
        ("llama", YARN, lambda m: m.config.rope_parameters.update(factor=2.0), "model.rotary_emb.inv_freq: not what"),
        (
            *("llama", YARN, lambda m: m.config.rope_parameters.update(attention_factor=1.0)),
            "model.rotary_emb.inv_freq: not what",
        ),
        ("llama", {}, lambda m: m.model.rotary_emb.inv_freq.mul_(0.5), "model.rotary_emb.inv_freq: not what"),
        (
            *("gemma3_text", {}, lambda m: give_theta(m, "sliding_attention")),
            "model.rotary_emb.sliding_attention_inv_freq: not what",
        ),
        ("llama", {}, nn.Module.bfloat16, "model.rotary_emb.inv_freq: rounded to torch.bfloat16 when the model was"),
        ("llama", {}, nn.Module.half, "model.rotary_emb.inv_freq: rounded to torch.float16"),
        ("llama", {}, nn.Module.double, None),
        ("llama", LONG, lambda m: m(torch.ones(1, 90, dtype=torch.long)), None),  # its frequencies are those of 90
    ],
)
def test_rope_is_that_of_the_config(family, changes, change, refusal):
    model = tiny_model(family, **changes)
    change(model)
    for engine in ("auto", "documents"):
        if refusal is None:
            torchtrain.attach(model, engine)
        else:
            assert refused(lambda: torchtrain.attach(model, engine)).startswith(refusal)  # noqa: B023


def test_a_family_that_drops_document_ids_is_told_so(monkeypatch):
    monkeypatch.setattr("torchtrain.attention.recurrent._HANDS_NOTHING_ON", {})
    message = refused(lambda: torchtrain.attach(tiny("stablelm")))
    assert re.match(r"document_ids: \w+DecoderLayer was given them and does not hand them on", message)


def test_lora_and_gradient_checkpointing():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    torchtrain.attach(model).train()
    inputs = batch()
    embeds = model.get_input_embeddings()(inputs.pop("input_ids")).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, **inputs, use_cache=False).logits
    (gradient,) = torch.autograd.grad(logits[:, -1].square().sum(), embeds)
    assert torch.equal(gradient.any(-1), visible_BTT(inputs["document_ids"])[:, -1])
    assert refused(lambda: model(**batch(), labels=torch.roll(batch()["input_ids"], -1))).startswith("labels: each")
    model.base_model.model.model.layers[0].mlp = Shifted(model.base_model.model.model.layers[0].mlp)
    assert refused(lambda: torchtrain.attach(model)).startswith("base_model.model.model.layers.0.mlp (Shifted)")


def test_document_ids_that_another_implementation_would_swallow():
    model = torchtrain.attach(tiny())
    model.set_attn_implementation("sdpa")
    assert model.generate(batch()["input_ids"], max_new_tokens=2, do_sample=False).shape == (1, 14)
    assert "'sdpa' ignores them in silence" in refused(lambda: model(**batch()))
    model.set_attn_implementation("anchor")
    assert model(**batch()).logits.isfinite().all()


def shifted_labels(inputs) -> torch.Tensor:
    labels = torch.roll(inputs["input_ids"], -1, dims=1)
    labels[:, [5, 11]] = -100
    return labels


def test_labels_that_are_shifted_already_are_refused_and_the_right_call_is_right():
    model, inputs = torchtrain.attach(tiny()), batch()
    labels = shifted_labels(inputs)
    assert refused(lambda: model(**inputs, labels=labels)).startswith("labels: each is already the next token")
    output = model(**inputs, labels=labels, shift_labels=labels)
    assert torch.equal(output.loss, nn.functional.cross_entropy(output.logits[0], labels[0]))


@pytest.mark.parametrize(
    ("documents", "ignored"),
    [
        ([1] * 6 + [2] * 6, 6),
        ([0] + [1] * 5 + [2] * 6, 6),  # what follows the anchor may be learnt
        ([0] + [1] * 8 + [-1] * 3, 9),
    ],
)
def test_labels_that_would_be_shifted_over_the_end_of_a_document_are_refused(documents, ignored):
    model, inputs = torchtrain.attach(tiny()), batch()
    labels = inputs["input_ids"]
    model(**inputs | {"document_ids": torch.ones_like(labels)}, labels=labels)  # one document has no end inside
    inputs["document_ids"] = torch.tensor([documents])
    said = refused(lambda: model(**inputs, labels=labels))
    assert said.startswith("labels: transformers shifts them over the ends of documents")
    shift_labels = shifted_labels(inputs)
    model(**inputs, labels=shift_labels, shift_labels=shift_labels)
    labels = labels.clone()
    labels[:, ignored] = -100
    model(**inputs, labels=labels)


def test_a_batch_that_tells_nothing_and_a_call_that_failed_decide_nothing():
    model, inputs = torchtrain.attach(tiny()), batch()
    model(**inputs, labels=torch.full_like(inputs["input_ids"], -100))
    for _ in range(2):
        assert refused(lambda: model(**inputs, labels=shifted_labels(inputs))).startswith("labels: each is already")
    said = refused(lambda: model(**inputs, labels=inputs["input_ids"]))
    assert said.startswith("labels: transformers shifts them over the ends")


def test_targets_that_give_no_loss_are_warned_of_once(caplog):
    model, inputs = torchtrain.attach(tiny()), with_labels(batch())
    del inputs["labels"]
    assert model(**inputs).loss is model(**inputs).loss is None
    assert caplog.text.count("shift_labels without labels: transformers computes no loss; torchtrain.collate") == 1
