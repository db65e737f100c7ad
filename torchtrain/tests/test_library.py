"""`torchtrain.pack` and `torchtrain.collate`: what goes in, what comes out, by the trainer's own packing."""

import pickle

import datasets
import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

import torchtrain
from anchorline.errors import UserError
from torchtrain.config import DataConfig, PackConfig, RopeConfig, Source
from torchtrain.data import PackedRows, anchor_ids, pad_id, prepare, tag_ids
from torchtrain.modeling.rope import extend
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl
from torchtrain.tests.tiny import tiny_model

TEXTS = [" ".join(f"w{(3 * n + i) % 50}" for i in range(3 + n % 9)) for n in range(40)]
RECORDS = [{"text": text, "kind": "ab"[n % 2]} for n, text in enumerate(TEXTS)]
ARRAYS = ["input_ids", "position_ids", "document_ids", "shift_labels", "domain_ids"]


def assert_same(rows, others):
    assert len(rows) == len(others)
    for row, other in zip(rows, others, strict=True):
        assert list(row) == ARRAYS
        assert all(np.array_equal(row[name], other[name]) for name in ARRAYS)


@pytest.mark.parametrize("variant", ["anchor", "intra_reset+tag", "anchor+interleave"])
def test_rows_are_those_that_a_run_trains_on(tmp_path, variant):
    tokenizer, pack = word_tokenizer(), PackConfig(sequence_length=24, variant=variant, strategy="best_fit")
    path = write_jsonl(tmp_path / "texts.jsonl", RECORDS)
    data = DataConfig(sources=[Source(files=str(path), domain_field="kind")], cache=str(tmp_path / "cache"))
    store = prepare(data, tokenizer)
    given = (pack, 5, anchor_ids(tokenizer, pack), tag_ids(tokenizer, pack, store.domains), pad_id(tokenizer))
    expected = PackedRows(store, np.arange(len(store)), *given)
    rows = torchtrain.pack(
        RECORDS, tokenizer, sequence_length=24, variant=variant, domain_field="kind", seed=5, strategy="best_fit"
    )
    assert isinstance(rows, torch.utils.data.Dataset)
    assert_same(rows, expected)


def test_all_kinds_of_documents_are_the_same_rows():
    tokenizer = word_tokenizer()
    rows = torchtrain.pack(TEXTS, tokenizer, sequence_length=32)
    ids = [[*tokenizer.encode(text), 2] for text in TEXTS]
    table = datasets.Dataset.from_list(RECORDS)
    for documents in (
        (text for text in TEXTS),
        RECORDS,
        table,
        table.to_iterable_dataset(),
        ids,
        [np.array(one) for one in ids],
        [torch.tensor(one) for one in ids],
        [{"input_ids": one} for one in ids],
    ):
        assert_same(torchtrain.pack(documents, tokenizer, sequence_length=32), rows)
    assert_same(pickle.loads(pickle.dumps(rows)), rows)
    made = rows.to_datasets()
    assert isinstance(made, datasets.Dataset)
    assert made[:] == {name: [row[name].tolist() for row in rows] for name in ARRAYS}


def test_a_batch_has_its_targets_twice():
    rows = torchtrain.pack(TEXTS, word_tokenizer(), sequence_length=32)
    batch = torchtrain.collate(list(rows))
    again = torchtrain.collate(list(rows.to_datasets()))
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert torch.equal(batch["labels"][:, 1:], batch["shift_labels"][:, :-1])
    assert (batch["shift_labels"] != -100).sum() == (batch["labels"][:, 1:] != -100).sum()


def test_columns_that_a_trainer_would_remove_are_named(tmp_path):
    trainer = Trainer(
        torchtrain.attach(tiny_model("llama")),
        TrainingArguments(str(tmp_path), max_steps=1, save_strategy="no", report_to="none"),
        data_collator=torchtrain.collate,
        train_dataset=torchtrain.pack(TEXTS, word_tokenizer(), sequence_length=32),
    )
    with pytest.raises(UserError, match=r"no document_ids; .*remove_unused_columns=False"):
        trainer.train()


@pytest.mark.parametrize(
    ("documents", "settings", "message"),
    [
        ([], {}, "documents: there is none"),
        ("a text", {}, "give a list of texts"),
        ({"train": TEXTS}, {}, "one split"),
        ([" "], {}, r"documents\[0\]: the text is blank"),
        (["w1", {"body": "w1"}], {}, r"documents\[1\]: has no 'text' and no 'input_ids', but body; set text_field"),
        ([{"input_ids": [3], "shift_labels": [3]}], {}, r"documents\[0\]: has shift_labels; pack shifts labels itself"),
        (["w1"], {"domain_field": "kind"}, "belongs to dicts"),
        ([{"text": "w1"}], {"domain_field": "kind"}, "'kind' is None"),
        ([[99]], {}, r"documents\[0\]: the token ids go from 99 to 99; give those of 0\.\.52"),
        (["w1"], {"sequence_length": 1}, "sequence_length: 1: give 2 or more"),
        (["w1"], {"variant": "anchors"}, "'anchors' is none of full, intra, intra_reset, anchor"),
        (["w1"], {"strategie": "best_fit"}, "strategie"),
        (["w1"], {"tokenizer": object()}, "tokenizer: object is no fast tokenizer"),
        (["w1"], {"seed": -1}, "seed: -1; give an integer"),
        (["w1"], {"append_eos": "no"}, "append_eos: 'no'; give True or False"),
        (["w1", []], {}, r"documents\[1\]: a list without a token id; remove it"),
        ([np.zeros(0, int)], {}, r"documents\[0\]: a ndarray without a token id"),
        ([{"input_ids": ()}], {}, r"documents\[0\]: a tuple without a token id"),
        ([[[3]]], {}, r"documents\[0\]: a list is no text and no list of token ids"),
        (["w1 \ud800"], {}, r"documents\[0\]: the text has half of a surrogate pair"),
    ],
)
def test_what_does_not_fit_is_one_line(documents, settings, message):
    given = {"tokenizer": word_tokenizer(), "sequence_length": 16} | settings
    with pytest.raises(UserError, match=message) as raised:
        torchtrain.pack(documents, **given)
    assert "\n" not in str(raised.value)


def test_what_collate_cannot_stack_is_one_line():
    first, second = list(torchtrain.pack(TEXTS, word_tokenizer(), sequence_length=32))[:2]
    for rows, message in (
        (first, "there are no rows; give a list"),
        ([first, 3], r"rows\[1\]: a int with no input_ids"),
        ([first, {name: x[:8] for name, x in second.items()}], r"rows\[1\]: input_ids is int64 \[8\]; give"),
        ([first, second | {"position_ids": [1]}], r"rows\[1\]: position_ids is int64 \[1\]"),
        ([first | {"input_ids": first["input_ids"] * 1.0}], r"input_ids is float\d\d \[32\]; give integers"),
    ):
        with pytest.raises(UserError, match=message):
            torchtrain.collate(rows)


def test_a_config_for_longer_rows_is_that_of_a_run_and_longer_rows_without_it_are_warned_of(caplog):
    model = tiny_model("llama", max_position_embeddings=8)
    with pytest.raises(UserError, match=r"rope\.factor"):
        torchtrain.extend(model.config, 16, factor=0.5)
    longer = torchtrain.extend(model.config, 16)
    assert longer == extend(model.config, RopeConfig(type="ntk"), 16)
    ids = torch.arange(12)[None] + 3
    for config, said in ((model.config, 1), (longer, 0)):
        caplog.clear()
        attached = torchtrain.attach(type(model)(config))
        for _ in range(2):
            attached(ids, document_ids=torch.ones_like(ids), use_cache=False)
        warned = [record.getMessage() for record in caplog.records if "position_ids" in record.getMessage()]
        assert len(warned) == said
        assert all("reach 11, and the model holds 8 positions" in line for line in warned)
