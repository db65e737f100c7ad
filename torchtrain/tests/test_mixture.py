"""Which documents are trained on: groups, mixtures and splits against slow twins, and no text on both sides."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anchorline.errors import UserError
from torchtrain.config import DataConfig, MixtureConfig, PackConfig, Source
from torchtrain.data import PackedRows, TokenStore, fingerprint, prepare, split_documents
from torchtrain.data.mixture import draw_repeats
from torchtrain.data.statistics import count_store
from torchtrain.data.streams import HELD_OUT, MIX, random_stream
from torchtrain.tests.data_fixtures import memory_store, word_tokenizer, write_jsonl

NAMES = ["web", "books", "code"]


# --- mixtures ---------------------------------------------------------------------------------------------------------


def slow_repeats(lengths, domains, names, mixture: MixtureConfig) -> list[int]:
    """Take one document after another, pass after pass, until there are tokens enough."""
    repeats = [0] * len(lengths)
    total = mixture.tokens if mixture.tokens is not None else sum(lengths)
    for domain, name in enumerate(names):
        long = [i for i in range(len(lengths)) if domains[i] == domain and lengths[i] >= mixture.long_tokens]
        short = [i for i in range(len(lengths)) if domains[i] == domain and lengths[i] < mixture.long_tokens]
        in_long, in_short = sum(lengths[i] for i in long), sum(lengths[i] for i in short)
        if mixture.shares is None:
            share = (in_long + in_short) / max(1, sum(lengths))
        else:
            share = mixture.shares[name] / sum(mixture.shares.values())
        budget = round(total * share)
        part = 1.0 if long else 0.0
        if long and short:
            part = in_long / (in_long + in_short)
            if mixture.long_share is not None and mixture.long_share > part:
                part = mixture.long_share
            if mixture.long_weight is not None:
                part = mixture.long_weight * in_long / (mixture.long_weight * in_long + in_short)
        for own, is_long, wanted in ((long, 1, round(budget * part)), (short, 0, budget - round(budget * part))):
            taken = 0
            for _ in range(mixture.most_repeats):
                for i in random_stream(mixture.seed, MIX, domain, is_long).permutation(own).astype(int):
                    if taken < wanted:
                        repeats[i] += 1
                        taken += lengths[i]
    return repeats


corpora = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2)), min_size=1, max_size=60)
mixtures = st.builds(
    MixtureConfig,
    tokens=st.none() | st.integers(1, 3000),
    shares=st.none() | st.fixed_dictionaries({name: st.floats(0.01, 1) for name in NAMES}),
    long_tokens=st.integers(1, 45),
    long_share=st.none() | st.floats(0, 1),
    most_repeats=st.integers(1, 5),
    seed=st.integers(0, 3),
) | st.builds(MixtureConfig, long_tokens=st.integers(1, 45), long_weight=st.floats(1, 50))


@settings(max_examples=150, deadline=None)
@given(corpora, mixtures)
def test_it_takes_what_the_slow_twin_takes(corpus, mixture):
    lengths, domains = (np.array(column) for column in zip(*corpus, strict=True))
    found = draw_repeats(lengths, domains, NAMES, mixture)
    assert found.tolist() == slow_repeats(lengths.tolist(), domains.tolist(), NAMES, mixture)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ({"web": 0.5, "books": 0.5}, "the domain 'code' is missing; give it a share"),
        (
            {"web": 0.5, "boks": 0.1, "code": 0.1, "books": 0.1},
            "the corpus has no domain 'boks'; it has web, books, code",
        ),
    ],
)
def test_shares_that_do_not_fit_are_refused(shares, message):
    with pytest.raises(UserError, match=message):
        draw_repeats(np.array([1, 2, 3]), np.array([0, 1, 2]), NAMES, MixtureConfig(shares=shares))


def test_what_is_taken_trains_as_often_and_nothing_of_it_is_held_out():
    store = memory_store([30] * 100, [i % 2 for i in range(100)])
    plain = split_documents(store, 0.1, seed=1)
    repeats = np.arange(100, dtype=np.uint16) % 4
    split = split_documents(replace(store, repeats=repeats), 0.1, seed=1)
    assert np.intersect1d(split.train, split.held_out).size == 0
    documents, counts = np.unique(split.train, return_counts=True)
    np.testing.assert_array_equal(counts, repeats[documents])
    np.testing.assert_array_equal(documents, plain.train[repeats[plain.train] > 0])
    np.testing.assert_array_equal(split.held_out, plain.held_out)
    rows = PackedRows(store, split.train, PackConfig(sequence_length=64), 0, [1], {}, pad_id=0)
    row = np.concatenate([rows[i]["input_ids"] for i in range(len(rows))])
    tokens, times = np.unique(row[row > 999], return_counts=True)
    np.testing.assert_array_equal(times, np.repeat(counts, 30))
    np.testing.assert_array_equal(tokens, np.concatenate([store.document(i) for i in documents]))


def test_a_store_keeps_its_mixture_and_another_mixture_is_another_store(tmp_path):
    texts = [{"text": "w1 " * (2 + 3 * (i % 7))} for i in range(60)]
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    plain = DataConfig(sources=[Source(files=str(path))], cache=str(tmp_path / "cache"))
    mixed = plain.model_copy(update={"mixture": MixtureConfig(long_tokens=15, long_share=0.9)})
    assert prepare(plain, word_tokenizer()).repeats is None
    store = prepare(mixed, word_tokenizer())
    assert store.repeats is not None
    expected = draw_repeats(store.lengths, store.document_domains, store.domains, mixed.mixture)
    np.testing.assert_array_equal(store.repeats, expected)
    store.verify()
    assert "repeats.npy" in store.header.files
    names = {fingerprint(data, word_tokenizer()) for data in (plain, mixed)}
    assert len(names) == 2
    content = bytearray((store.folder / "repeats.npy").read_bytes())
    content[-1] ^= 1
    (store.folder / "repeats.npy").write_bytes(content)
    with pytest.raises(UserError, match=r"repeats\.npy: its content has changed"):
        TokenStore.open(store.folder).verify()


def test_removed_duplicates_are_neither_trained_on_nor_held_out(tmp_path):
    """Of 60 records of 7 texts 7 remain, the first of each; a mixture chooses from these."""
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "w1 " * (2 + 3 * (i % 7))} for i in range(60)])
    data = DataConfig(sources=[Source(files=str(path))], cache=str(tmp_path / "cache"), remove_duplicates=True)
    store = prepare(data, word_tokenizer())
    assert (len(store), store.copies) == (60, 53)
    split = split_documents(store, 0.4, seed=0)
    assert sorted([*split.train, *split.held_out]) == list(range(7))
    assert len(split.held_out) >= 1
    told = count_store(store, [8])
    assert (told.all.documents, told.before[0].documents, told.mixture) == (7, 60, None)
    mixture = MixtureConfig(long_tokens=15, long_share=0.9, most_repeats=9)
    mixed = prepare(data.model_copy(update={"mixture": mixture}), word_tokenizer())
    expected = draw_repeats(store.lengths[:7], store.document_domains[:7], store.domains, mixture)
    np.testing.assert_array_equal(mixed.repeats, [*expected, *[0] * 53])
    assert [one.documents for one in count_store(mixed, [8]).mixture] == [3, 4]


# --- the held-out split -----------------------------------------------------------------------------------------------


def store_of(texts: list[int], domains: list[int]):
    """A store of documents of three tokens; the same number, the same text."""
    store = memory_store([3] * len(texts), domains)
    store.shards[0][:] = np.repeat(np.array(texts, dtype=np.int32), 3)
    return store


def drawn_document_by_document(store, share: float, seed: int) -> list[int]:
    """The draw without regard to copies."""
    held_out = []
    for domain in range(len(store.domains)):
        own = np.flatnonzero(store.document_domains == domain)
        count = round(share * len(own))
        if share > 0 and len(own) > 1:
            count = max(count, 1)
        held_out.append(random_stream(seed, HELD_OUT, domain).permutation(own)[:count])
    return np.sort(np.concatenate(held_out)).tolist()


CORPORA = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 2)), min_size=1, max_size=40)


@given(CORPORA, st.sampled_from([0.0, 0.05, 0.3, 0.5, 1.0]), st.integers(0, 99))
def test_no_text_stands_on_both_sides(documents, share, seed):
    texts, domains = (list(column) for column in zip(*documents, strict=True))
    store = store_of(texts, domains)
    train, held, moved = split_documents(store, share, seed)
    assert sorted([*train, *held]) == list(range(len(texts)))
    assert not {texts[i] for i in train} & {texts[i] for i in held}
    before = drawn_document_by_document(store, share, seed)
    assert moved == len(set(held.tolist()) ^ set(before))
    torn = {texts[i] for i in before} & {t for i, t in enumerate(texts) if i not in set(before)}
    assert (moved > 0) == bool(torn)
    assert store.copies == len(texts) - len(set(texts))
    # Repeated, it is the same.
    np.testing.assert_array_equal(split_documents(store, share, seed).held_out, held)


def test_a_text_larger_than_the_share_does_not_take_all_of_it():
    texts = [0] * 50 + list(range(1, 51))
    train, held, _ = split_documents(store_of(texts, [0] * 100), 0.1, seed=0)
    assert len(held) == 10
    assert 0 not in held
    assert set(range(50)) <= set(train.tolist())
    # Of one text only, nothing can be held out that is not trained on.
    assert not len(split_documents(store_of([1] * 9, [0] * 9), 0.1, seed=0).held_out)
    # Of two, the smaller.
    assert split_documents(store_of([1] * 6 + [2] * 3, [0] * 9), 0.1, seed=0).held_out.tolist() == [6, 7, 8]
