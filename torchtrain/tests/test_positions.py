"""Documents that positions show: who sees whom does not depend on what a row begins with, and labels end with them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, MambaConfig, MambaForCausalLM, Trainer, TrainingArguments

import torchtrain
from torchtrain.attention import make_plan
from torchtrain.tests.tiny import refused, tiny_model

WHOLE = list(range(7))
LAYOUTS = {
    "begins inside a document": [3, 4, 5, 6, 0, 1, 2],
    "restarts at 1": [1, 2, 3, 4, 1, 2, 3],
    "restarts at other numbers": [7, 8, 5, 6, 6, 7, 8],
    "documents of one token": [0, 0, 0, 1, 0, 4, 5],
    "jumps ahead": [0, 1, 2, 10, 11, 12, 13],
    "falls": [6, 5, 6, 3, 4, 3, 2],
    "one document": WHOLE,
}


def ids_of(rows: list[list[int]]) -> Tensor:
    """Documents by their definition, row by row."""
    return torch.tensor([[1 + sum(b != a + 1 for a, b in pairwise(row[:i])) for i in range(1, 8)] for row in rows])


def tokens_of(rows: list[list[int]]) -> Tensor:
    return torch.randint(0, 250, (len(rows), 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def models():
    return {engine: torchtrain.attach(tiny_model(), engine).eval() for engine in ("auto", "dense", "documents")}


def assert_alone(logits: Tensor, tokens: Tensor, positions: Tensor, documents: Tensor) -> None:
    """Compare with transformers' own model on each document alone."""
    plain = tiny_model().eval()
    for row, ids in enumerate(documents):
        for document in ids.unique():
            own = ids == document
            alone = plain(tokens[row][None, own], position_ids=positions[row][None, own], use_cache=False).logits[0]
            torch.testing.assert_close(logits[row, own], alone)


@pytest.mark.parametrize("engine", ["auto", "dense", "documents"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_document_is_what_it_is_alone(models, engine, layout):
    for rows in ([WHOLE, LAYOUTS[layout]], [LAYOUTS[layout], WHOLE]):
        tokens, positions = tokens_of(rows), torch.tensor(rows)
        with torch.no_grad():
            logits = models[engine](tokens, position_ids=positions, use_cache=False).logits
            assert_alone(logits, tokens, positions, ids_of(rows))


def test_one_row_of_positions_serves_the_whole_batch(models):
    rows = [LAYOUTS["begins inside a document"]] * 3
    tokens = tokens_of(rows)
    with torch.no_grad():
        logits = models["auto"](tokens, position_ids=torch.tensor(rows[:1])).logits
        assert_alone(logits, tokens, torch.tensor(rows), ids_of(rows))


def test_torch_compile_reads_the_same():
    torch.compiler.reset()
    model = torchtrain.attach(tiny_model(num_hidden_layers=1).eval())
    call = torch.compile(lambda **inputs: model(**inputs), fullgraph=True, backend="eager")
    with torch.no_grad():
        for rows in ([WHOLE, LAYOUTS["begins inside a document"]], [LAYOUTS["restarts at 1"], WHOLE]):
            tokens = tokens_of(rows)
            inputs = {"position_ids": torch.tensor(rows), "labels": tokens.masked_fill(torch.arange(7) == 4, -100)}
            assert torch.equal(call(input_ids=tokens, **inputs).logits, model(tokens, **inputs).logits)
            said = refused(lambda: call(input_ids=tokens, **inputs | {"labels": tokens}))  # noqa: B023
            assert said.startswith("labels: transformers shifts them over the ends of documents")


OFFSETS = torch.tensor([0, 4, 5, 7], dtype=torch.int32)


@pytest.mark.parametrize(
    ("said", "refusal"),
    [
        ({"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS, "max_length_q": 4, "max_length_k": 4}, None),
        ({"cu_seq_lens_q": OFFSETS[[0, 1, 2, 3, 3, 3]]}, None),
        ({"seq_idx": torch.tensor([[4, 4, 4, 4, 0, 1, 1]], dtype=torch.int32)}, None),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 3, 3]])}, None),
        ({"attention_mask": torch.ones(1, 7)}, None),
        ({"cu_seq_lens_q": OFFSETS + 1}, "cu_seq_lens_q: begins documents elsewhere than position_ids"),
        ({"cu_seq_lens_q": OFFSETS[[0, 1, 2, 2]]}, "cu_seq_lens_q: begins"),
        ({"cu_seq_lens_q": OFFSETS, "cu_seq_lens_k": OFFSETS[[0, 3]]}, "cu_seq_lens_k: begins"),
        ({"seq_idx": torch.zeros(1, 7, dtype=torch.int32)}, "seq_idx: begins documents elsewhere than position_ids"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3, 3]])}, "attention_mask: its segments are not the"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 0, 0]])}, "attention_mask: not honoured by `anchor` unless"),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "documents"])
def test_what_else_tells_documents_must_agree(models, engine, said, refusal):
    rows = [[3, 4, 5, 6, 2, 0, 1]]
    inputs = {"input_ids": tokens_of(rows), "position_ids": torch.tensor(rows)}
    if refusal is not None:
        assert refused(lambda: models[engine](**inputs, **said)).startswith(refusal)
        return
    with torch.no_grad():
        assert torch.equal(models[engine](**inputs, **said).logits, models[engine](**inputs).logits)


@pytest.mark.parametrize(("family", "engine"), [("llama", "auto"), ("llama", "documents"), ("mamba", "documents")])
@pytest.mark.parametrize("training", [True, False])
def test_a_row_without_documents_is_never_taken_for_one(family, engine, training):
    """Neither by a segment mask, nor with labels. Text may still be generated where nothing needs documents."""
    tokens = tokens_of([WHOLE])
    sizes = {"vocab_size": 250, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}
    model = tiny_model(family) if family == "llama" else MambaForCausalLM(MambaConfig(**sizes))
    model = torchtrain.attach(model, engine).train(training)
    for said in (
        {},
        {"labels": tokens},
        {"attention_mask": torch.ones_like(tokens)},
        {"attention_mask": torch.tensor([[1, 1, 1, 1, 2, 2, 2]])},
    ):
        assert refused(lambda: model(tokens, **said)).startswith(  # noqa: B023
            ("document_ids: missing", "attention_mask: not honoured by `anchor` unless")
        )
    if (family, engine) != ("llama", "auto"):
        assert model.eval().generate(tokens, max_new_tokens=2, do_sample=False).shape == (1, 9)


@pytest.mark.parametrize("engine", ["auto", "documents"])
@pytest.mark.parametrize("told", ["document_ids", "position_ids", "both", "plan", "second row"])
def test_labels_end_with_documents_in_every_batch(models, engine, told):
    rows = [LAYOUTS["begins inside a document"], WHOLE]
    tokens, positions = tokens_of(rows), torch.tensor(rows)
    inputs = {
        "document_ids": {"document_ids": ids_of(rows)},
        "position_ids": {"position_ids": positions},
        "both": {"document_ids": ids_of(rows), "position_ids": positions},
        "plan": {"plan": make_plan(ids_of(rows))},
        "second row": {"position_ids": positions.flip(0)},
    }[told]
    good = tokens.clone()
    good[:, 4] = -100
    for _ in range(2):
        models[engine](tokens, **inputs, labels=good)
        said = refused(lambda: models[engine](tokens, **inputs, labels=tokens))
        assert said.startswith("labels: transformers shifts them over the ends of documents")
    models[engine](tokens, **inputs, labels=good, shift_labels=good.roll(-1, 1))
    if told == "position_ids":  # and by the order of arguments
        said = refused(lambda: models[engine](tokens, None, positions, None, None, tokens))
        assert said.startswith("labels: transformers shifts them over the ends of documents")


def test_there_is_a_position_for_each_token(models):
    for shape in ((1, 6), (2, 6), (2, 8), (4, 7)):
        said = refused(lambda: models["auto"](tokens_of([WHOLE] * 3), position_ids=torch.zeros(shape).long()))  # noqa: B023
        assert said == f"position_ids: {list(shape)} for [3, 7] tokens; give one for each"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16, torch.complex64])
def test_document_ids_are_integers(models, dtype):
    tokens = tokens_of([WHOLE])
    for engine in ("auto", "documents"):
        said = refused(lambda: models[engine](tokens, document_ids=torch.ones(1, 7).to(dtype)))  # noqa: B023
        assert said.startswith(f"document_ids: expected an integer tensor [batch, tokens], got {dtype}")


def test_it_says_once_that_there_is_no_anchor(caplog):
    model, rows = torchtrain.attach(tiny_model()), [WHOLE]
    model(tokens_of(rows), document_ids=ids_of(rows), position_ids=torch.tensor(rows))
    assert "position_ids" not in caplog.text
    for _ in range(2):
        model(tokens_of(rows), position_ids=torch.tensor(rows))
    assert caplog.text.count("there is no anchor (rows of torchtrain.pack have one)") == 1
    assert refused(lambda: model(tokens_of(rows))).startswith("document_ids: missing")


def test_a_trainer_whose_last_batch_is_one_example(tmp_path):
    examples = [{"input_ids": list(range(n, 2 * n))} for n in range(3, 8)]
    settings = {"per_device_train_batch_size": 2, "num_train_epochs": 1, "report_to": "none", "save_strategy": "no"}
    trainer = Trainer(
        torchtrain.attach(tiny_model()),
        TrainingArguments(str(tmp_path), use_cpu=True, **settings),
        train_dataset=examples,  # type: ignore[arg-type]
        data_collator=DataCollatorWithFlattening(return_seq_idx=True),
    )
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(("family", "other"), [("llama", "sdpa"), ("gemma2", "eager"), ("gpt_oss", "eager")])
def test_generation_is_that_of_the_model_before(family, other):
    """Its positions jump where prompts are padded on the left. They are not read as documents."""
    tokens = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7]])
    asked = {"attention_mask": (tokens > 0).long(), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    model = tiny_model(family).eval()
    model.set_attn_implementation(other)
    expected = model.generate(tokens, **asked)
    torchtrain.attach(model)
    said = refused(lambda: model.generate(tokens, **asked))
    assert said.startswith("generate: `anchor` has no KV cache")
    assert f'model.set_attn_implementation("{other}")' in said
    model.set_attn_implementation(other)
    assert torch.equal(model.generate(tokens, **asked), expected)


def test_generation_with_engine_documents(models):
    tokens = torch.tensor([[0, 0, 5, 6], [4, 5, 6, 7]])
    asked = {"attention_mask": (tokens > 0).long(), "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(models["documents"].generate(tokens, **asked), tiny_model().eval().generate(tokens, **asked))
