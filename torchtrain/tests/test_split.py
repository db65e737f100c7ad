"""Held-out documents: drawn as ever where no text stands twice, by texts where one does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtrain.data import split_documents
from torchtrain.data.packing import HELD_OUT, random_stream
from torchtrain.tests.data_fixtures import memory_store


def store_of(texts: list[int], domains: list[int]):
    """A store of documents of three tokens; the same number, the same text."""
    store = memory_store([3] * len(texts), domains)
    store.shards[0][:] = np.repeat(np.array(texts, dtype=np.int32), 3)
    return store


def drawn_before(store, share: float, seed: int) -> list[int]:
    """The draw of every run before texts were looked at, copied from it."""
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
    before = drawn_before(store, share, seed)
    assert moved == len(set(held.tolist()) ^ set(before))
    torn = {texts[i] for i in before} & {t for i, t in enumerate(texts) if i not in set(before)}
    assert (moved > 0) == bool(torn)
    assert store.copies == len(texts) - len(set(texts))
    # Repeated, it is the same.
    np.testing.assert_array_equal(split_documents(store, share, seed).held_out, held)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.floats(0, 1), st.integers(0, 2**32 - 1))
def test_without_copies_it_is_the_draw_that_it_was(domains, share, seed):
    store = store_of(list(range(len(domains))), domains)
    split = split_documents(store, share, seed)
    assert split.held_out.tolist() == drawn_before(store, share, seed)
    assert split.moved == store.copies == 0


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_two_hundred_records_of_twenty_texts(share):
    texts = [i % 20 for i in range(200)]
    train, held, moved = split_documents(store_of(texts, [0] * 200), share, seed=3)
    assert len(held) == round(share * 200)
    assert not {texts[i] for i in train} & {texts[i] for i in held}
    assert moved


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
