"""`torchtrain.pack` and `torchtrain.collate`: what goes in, what comes out, by the trainer's own packing."""

import copy
import pickle

import datasets
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

import torchtrain
from anchorline.errors import UserError
from torchtrain.config import DataConfig, PackConfig, RopeConfig, Source
from torchtrain.data import PackedRows, anchor_ids, check_tokenizer, pad_id, prepare, tag_ids
from torchtrain.data.writer import Tokeniser
from torchtrain.modeling.rope import extend
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl
from torchtrain.tests.tiny import refused, tiny_model

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


def backend_state(tokenizer):
    backend = tokenizer.backend_tokenizer
    state = backend.truncation, backend.padding, backend.encode_special_tokens, backend.to_str()
    return *state, tokenizer.split_special_tokens, dict(tokenizer.init_kwargs), tokenizer.special_tokens_map


@pytest.mark.parametrize("variant", ["anchor", "anchor+tag"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_pack_changes_nothing_that_it_is_given(variant, wrapped):
    class Wrapped(PreTrainedTokenizerFast):
        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    tokenizer = word_tokenizer()
    tokenizer.pad_token = "w0"
    if wrapped:  # it encodes by a call of its own
        special = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        tokenizer = Wrapped(tokenizer_object=tokenizer.backend_tokenizer, **special)
    tokenizer.backend_tokenizer.enable_truncation(3, stride=1)
    tokenizer.backend_tokenizer.enable_padding(length=7, pad_id=3, pad_token="w0")
    ids, tensor, array = [3, 4, 5], torch.tensor([5, 6, 7]), np.array([7, 8, 9], np.int32)
    table = datasets.Dataset.from_list(RECORDS).with_format("numpy")
    for documents in (TEXTS, RECORDS, [ids, tensor, array], [{"text": "w1", "more": [1]}], table):
        given = copy.deepcopy(documents)
        before = backend_state(tokenizer)
        rows = torchtrain.pack(documents, tokenizer, sequence_length=16, variant=variant, anchor=[3, 4])
        rows[0]["input_ids"][:] = 1
        assert max(rows[0]["input_ids"]) > 1
        batch = torchtrain.collate([rows[0]])
        batch["input_ids"][:] = 1
        assert backend_state(tokenizer) == before
        assert (ids, tensor.tolist(), array.tolist()) == ([3, 4, 5], [5, 6, 7], [7, 8, 9])
        if documents is table:
            assert (table.format, table[:]["text"].tolist()) == (given.format, TEXTS)
        elif documents[0] is not ids:
            assert documents == given


def test_collate_changes_no_row():
    for rows in (
        torchtrain.pack(TEXTS, word_tokenizer(), 16),
        torchtrain.pack(TEXTS, word_tokenizer(), 16).to_datasets(),
    ):
        given = [rows[0], rows[1], {name: torch.tensor(x) for name, x in rows[2].items()}]
        before = copy.deepcopy(given)
        torchtrain.collate(given)["labels"][:] = 0
        torchtrain.collate(given)["position_ids"][:] = 0
        for row, other in zip(given, before, strict=True):
            assert all(np.array_equal(row[name], other[name]) for name in ARRAYS)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gemma3_text"])
def test_extend_and_attach_change_no_config(family):
    """Models are made of one config: the second must not be made of what the first became."""
    model = tiny_model(family)
    given = copy.deepcopy(model.config)
    config, before = given, (given.to_json_string(use_diff=False), repr(vars(given)))
    model = type(model)(config)
    weights = {name: x.clone() for name, x in model.state_dict().items()}
    random = torch.get_rng_state()
    for _ in range(2):
        attached = torchtrain.attach(model, engine="dense")
    assert attached is model
    assert (config.to_json_string(use_diff=False), repr(vars(config))) == before
    assert model.config._attn_implementation != config._attn_implementation
    assert model.config.to_json_string(use_diff=False) == before[0]
    assert all(torch.equal(weights[name], x) for name, x in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    longer = torchtrain.extend(config, 256, type="linear")
    longer.rope_parameters["rope_type"] = "other"
    assert (config.to_json_string(use_diff=False), repr(vars(config))) == before


@pytest.mark.parametrize("name", ["bos", "eos", "pad"])
@pytest.mark.parametrize("unknown", [True, False])
def test_a_special_token_that_the_vocabulary_lacks_is_named(tmp_path, name, unknown):
    """With an unknown token transformers gives the id of that, without one None."""
    tokenizer = word_tokenizer()
    if not unknown:
        backend = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    setattr(tokenizer, f"{name}_token", "</x>")
    assert getattr(tokenizer, f"{name}_token_id") == (0 if unknown else None)
    message = f"the tokenizer's {name.upper()} '</x>' is not in its vocabulary; name a token that is ({name}_token)"
    anchor = {} if name == "bos" else {"anchor": 3}
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1 w2"}])
    data = DataConfig(sources=[Source(files=str(path))], cache=str(tmp_path / "cache"))
    calls = [lambda: torchtrain.pack(["w1 w2"], tokenizer, 8, **anchor), lambda: check_tokenizer(tokenizer, 99)]
    if name == "eos":
        calls += [lambda: prepare(data, tokenizer), lambda: Tokeniser(data, tokenizer)]
    for call in calls:
        assert message in refused(call)
    if name == "eos" and unknown:  # where nothing asks for it
        tokenizer.pad_token = "w0"
        rows = torchtrain.pack(["w1 w2"], tokenizer, 4, append_eos=False, anchor=3)
        assert rows[0]["input_ids"].tolist()[:3] == [3, 4, 5]


def test_a_text_that_the_tokenizer_does_not_know_is_one_line():
    backend = Tokenizer(models.WordLevel({"w1": 0, "w2": 1}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="w2")
    assert "cannot encode a text: WordLevel error: Missing [UNK] token" in refused(
        lambda: torchtrain.pack(["w1 w3"], tokenizer, 8)
    )
    assert "can only write as the control token 1" in refused(lambda: torchtrain.pack(["w1 w2"], tokenizer, 8))


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
