"""Rows by number: conservation of tokens, one order for everyone, epochs, the split, batches."""

import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from anchorline.errors import UserError
from torchtrain.config import BASE_VARIANTS, DataConfig, PackConfig, Source
from torchtrain.data import PackedRows, anchor_ids, pad_id, prepare, split_documents, stack_rows, tag_ids
from torchtrain.data.dataset import check_store, check_tokenizer
from torchtrain.tests.data_fixtures import memory_store, word_tokenizer, write_jsonl

VARIANTS = [base + tag + chunks for base in BASE_VARIANTS for tag in ("", "+tag") for chunks in ("", "+interleave")]
FIRST = 1000  # a token id at or above it is one of a document, and no two are the same
TAGS = {0: [500, 501], 1: [502]}


def packed(lengths, variant, T=16, anchor=(1,), seed=0, **settings) -> PackedRows:
    store = memory_store(lengths, [i % 2 for i in range(len(lengths))], FIRST)
    pack = PackConfig(sequence_length=T, variant=variant, **settings)
    tags = TAGS if pack.tag else {}
    return PackedRows(store, np.arange(len(store)), pack, seed, list(anchor), tags, pad_id=0)


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12),
    st.sampled_from(VARIANTS),
    st.integers(1, 3),
    st.integers(7, 24),
    st.integers(1, 3),
    st.integers(0, 2**32 - 1),
    st.sampled_from(["pad", "drop"]),
)
def test_every_token_lands_once_or_is_counted(lengths, variant, anchor, T, B, seed, last):
    if last == "drop" and len(packed(lengths, variant, T, range(1, anchor + 1), seed)) == 1:
        return  # nothing may be left: refused, in a test of its own
    rows = packed(lengths, variant, T, range(1, anchor + 1), seed, last=last)
    batches = [stack_rows([rows[j] for j in range(i, min(i + B, len(rows)))]) for i in range(0, len(rows), B)]
    batch = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
    ids, labels, documents = batch["input_ids"], batch["shift_labels"], batch["document_ids"]
    assert ids.shape == (len(rows), T)

    text = ids >= FIRST
    landed = ids[text].sort().values
    assert len(landed.unique()) == len(landed)
    assert len(landed) + rows.plan(0).dropped_tokens == sum(lengths)
    assert last == "drop" or len(landed) == sum(lengths)
    assert (ids[:, :anchor] == torch.arange(1, anchor + 1)).all()
    # A label is the next token of the same document (their ids count up), and only text has one.
    has_label = labels != -100
    assert (labels[has_label] == ids[has_label] + 1).all()
    assert not (has_label & ~text).any()
    assert has_label.sum() == len(landed) - sum(len(rows.plan(0).spans(i)) for i in range(len(rows)))
    # Positions are within the row; padding is nobody's.
    assert batch["position_ids"].min() == 0
    assert batch["position_ids"].max() < T
    padding = documents == -1
    assert (ids[padding] == 0).all()
    assert not (padding & has_label).any()
    assert (batch["domain_ids"][padding] == -1).all()
    assert padding.sum() == rows.plan(0).padding_tokens


@pytest.mark.parametrize("variant", ["anchor", "full+tag+interleave"])
def test_rows_are_the_same_in_any_order_for_any_worker(variant):
    lengths = [5, 30, 2, 9, 14, 50]
    expected = [packed(lengths, variant)[i] for i in range(len(packed(lengths, variant)))]
    again = packed(lengths, variant)
    for i in reversed(range(len(expected))):
        np.testing.assert_equal(again[i], expected[i])
    loaded = list(DataLoader(again, batch_size=2, collate_fn=stack_rows, num_workers=2, multiprocessing_context="fork"))
    for i, batch in enumerate(loaded):
        for name, tensor in batch.items():
            assert torch.equal(tensor, stack_rows(expected[2 * i : 2 * i + 2])[name])


@pytest.mark.parametrize(("variant", "rows_of_epoch"), [("anchor", [10, 10, 10]), ("anchor+tag", [13, 12, 13])])
def test_epochs_go_on_with_another_order_and_all_tokens(variant, rows_of_epoch):
    lengths = [10, 3, 14, 6, 8, 5] * 3
    rows = packed(lengths, variant, seed=2)
    # With tags, an order may need another number of rows.
    assert [len(rows.plan(epoch)) for epoch in range(3)] == rows_of_epoch
    orders, index = [], 0
    for epoch, count in enumerate(rows_of_epoch):
        seen = []
        for row in range(count):
            assert rows.locate(index) == (epoch, row)
            ids = rows.row_at(index)["input_ids"]
            seen += ids[ids >= FIRST].tolist()
            index += 1
        assert sorted(seen) == list(range(FIRST, FIRST + sum(lengths)))
        orders.append(tuple(seen))
    assert len(set(orders)) == 3
    # Backwards, after the first plans have been given up.
    np.testing.assert_equal(rows.row_at(0), packed(lengths, variant, seed=2)[0])
    with pytest.raises(IndexError):
        rows[len(rows)]
    for index in (np.int64(1), np.array(1), torch.tensor(1)):  # as samplers of torch and numpy give them
        mixed = packed(lengths, f"{variant}+interleave")
        np.testing.assert_equal(mixed[index], mixed[1])
    for index in (1.0, "1", slice(1)):
        with pytest.raises(TypeError):
            rows[index]


@pytest.mark.parametrize("variant", ["anchor", "anchor+tag"])
def test_by_length_the_rows_of_a_step_are_alike_in_every_epoch(variant):
    together, lengths = 4, np.random.default_rng(0).integers(1, 60, 100).tolist()
    pack = PackConfig(sequence_length=64, variant=variant, strategy="by_length")
    tags = TAGS if pack.tag else {}
    store = memory_store(lengths, [i % 2 for i in range(len(lengths))], FIRST)
    rows = PackedRows(store, np.arange(len(store)), pack, 0, [1], tags, 0, together)
    assert len(rows) % together
    steps = [[rows.locate(i) for i in range(start, start + together)] for start in range(0, 4 * len(rows), together)]
    for epoch in range(3):
        plan = rows.plan(epoch)
        inside = [[row for _, row in step] for step in steps if all(e == epoch for e, _ in step)]
        pairs = [sorted(sum((x.stop - x.start) ** 2 for x in plan.spans(row)) for row in step) for step in inside]
        assert len(pairs) >= len(plan) // together - 1
        pairs.sort()
        assert all(one[-1] <= other[0] for one, other in itertools.pairwise(pairs)), "no step lies across another"


@pytest.mark.parametrize(("share", "expected"), [(0.0, [0, 0, 0]), (0.1, [10, 1, 0]), (0.5, [50, 1, 0])])
def test_split_takes_its_share_of_each_domain(share, expected):
    store = memory_store([3] * 103, [0] * 100 + [1] * 2 + [2])
    train, held, moved = split_documents(store, share, seed=1)
    assert not moved
    assert np.bincount(store.document_domains[held], minlength=3).tolist() == expected
    assert sorted([*train, *held]) == list(range(103))
    np.testing.assert_array_equal(held, split_documents(store, share, seed=1)[1])
    if share:
        assert held.tolist() != split_documents(store, share, seed=2)[1].tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [5], "variant": "anchor", "T": 100, "last": "drop"}, "pack.last 'drop' leaves no row: 5 tokens"),
        ({"lengths": [5], "variant": "anchor+tag", "T": 3}, "pack.sequence_length 3: an anchor of 1 and a tag of 2"),
        ({"lengths": [5], "variant": "anchor", "T": 3, "anchor": (1, 1, 1)}, "an anchor of 3"),
    ],
)
def test_rows_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        packed(**arguments)


def test_no_documents_are_refused():
    with pytest.raises(UserError, match=r"no documents to pack: lower data.held_out_share"):
        PackedRows(memory_store([3]), np.array([], dtype=int), PackConfig(sequence_length=6), 0, [1], {}, 0)


def test_anchor_is_bos_or_eos_or_as_told():
    def anchor(setting="auto", **special):
        return anchor_ids(word_tokenizer(**special), PackConfig(sequence_length=8, anchor=setting))

    assert anchor() == [1]
    assert anchor(bos=None) == [2]
    assert anchor(7) == [7]
    assert anchor([7, 8]) == [7, 8]
    with pytest.raises(UserError, match=r"neither BOS nor EOS"):
        anchor(bos=None, eos=None)
    with pytest.raises(UserError, match=r"pack.anchor 53: the tokenizer has no such token id"):
        anchor([5, 53])
    with pytest.raises(UserError, match=r"list is empty"):
        anchor([])


def test_tags_name_the_domain():
    pack = PackConfig(sequence_length=8, variant="full+tag", tag_template="w1 {domain}")
    assert tag_ids(word_tokenizer(), pack, ["w5", "w7 w8"]) == {0: [4, 8], 1: [4, 10, 11]}
    assert tag_ids(word_tokenizer(), PackConfig(sequence_length=8), ["w5"]) == {}
    with pytest.raises(UserError, match=r"has no tokens"):
        tag_ids(word_tokenizer(), pack.model_copy(update={"tag_template": " {domain}"}), [" "])


def test_padding_is_the_tokenizers_or_its_eos_or_0():
    tokenizer = word_tokenizer()
    assert pad_id(tokenizer) == 2
    tokenizer.pad_token = "w0"
    assert pad_id(tokenizer) == 3
    assert pad_id(word_tokenizer(eos=None)) == 0


def test_a_tokenizer_that_does_not_fit_the_model_is_refused():
    tokenizer = word_tokenizer(words=10)
    check_tokenizer(tokenizer, 13)
    with pytest.raises(UserError, match=r"ids go to 12 but the model's vocabulary has 12"):
        check_tokenizer(tokenizer, 12)
    # A token added for another purpose may lie outside, until the corpus uses it.
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    check_tokenizer(tokenizer, 13)
    store = memory_store([3], first=11)
    with pytest.raises(UserError, match=r"holds the token id 13 but"):
        check_store(store, 13)
    check_store(store, 14)


def test_a_finished_store_trains_without_the_reading_packages_and_pickles_as_its_folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1 w2 w3"}] * 5)
    store = prepare(DataConfig(sources=[Source(files=str(path))], cache=str(tmp_path / "cache")), word_tokenizer())
    copy = pickle.loads(pickle.dumps(store))
    np.testing.assert_array_equal(copy.shards[0], store.shards[0])
    assert len(pickle.dumps(store)) < 500
    script = (
        "import sys\n"
        "for name in ('datasets', 'pyarrow', 'pandas', 'transformers'): sys.modules[name] = None\n"
        "import numpy as np\n"
        "from torchtrain.config import PackConfig\n"
        "from torchtrain.data import PackedRows, TokenStore\n"
        f"store = TokenStore.open({str(store.folder)!r})\n"
        "rows = PackedRows(store, np.arange(5), PackConfig(sequence_length=6), 0, [1], {}, 0)\n"
        "print(rows[0]['input_ids'].tolist())\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[1, 4, 5, 6, 2, 4]"
