"""Near duplicates: datatrove's signatures, groups against a slow twin, and no group on both sides of the split."""

import numpy as np
import pytest
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtrain.config import DataConfig, Preparation, PrepareConfig, Source, TokenizerConfig
from torchtrain.data import TokenStore, near, prepare, split_documents
from torchtrain.data.near import BUCKETS, Signer, near_groups
from torchtrain.data.produce import produce
from torchtrain.data.statistics import statistics_of
from torchtrain.tests.data_fixtures import write_jsonl
from torchtrain.tests.tiny import tiny_tokenizer

BUCKET = st.integers(0, 6)  # 0: no signature


@settings(max_examples=40)
@given(st.lists(st.tuples(BUCKET, BUCKET, st.integers(0, 9)), min_size=1, max_size=9))
def test_groups_are_those_that_something_joins(documents):
    signatures = np.array([[a, b] for a, b, _ in documents], dtype=np.uint64)
    same = np.array([content for *_, content in documents])
    groups = near_groups(signatures, np.unique(same, return_inverse=True)[1])
    reached = {i: {i} for i in range(len(documents))}
    for _ in documents:
        for i, own in reached.items():
            for j in list(own):
                own |= {
                    k
                    for k in reached
                    if same[k] == same[j] or any(x == y != 0 for x, y in zip(signatures[k], signatures[j], strict=True))
                }
            reached[i] = own
    for i, own in reached.items():
        assert {j for j in reached if groups[j] == groups[i]} == own
    assert set(groups) == set(range(max(groups) + 1))


def test_a_chain_is_one_group_however_long():
    """Document i shares a bucket with the next one, in random order."""
    order = np.random.default_rng(0).permutation(4000)
    links = np.arange(1, 4001, dtype=np.uint64)
    signatures = np.empty((4000, 2), dtype=np.uint64)
    signatures[order] = np.stack([links // 2 + 1, (links + 1) // 2 + 5000], axis=1)
    assert set(near_groups(signatures, np.arange(4000))) == {0}


def test_tables_of_other_numbers_are_not_near():
    random = np.random.default_rng(0)
    first, second = (Signer().sign(" ".join(f"{x:.2f}" for x in random.normal(size=240))) for _ in range(2))
    assert not (first == second).any()


def test_a_signature_is_datatroves_whatever_is_hashed_at_one_time(monkeypatch):
    text = " ".join(f"Word-{i * i % 97}," for i in range(100))
    whole = Signer().sign(text)
    signer = Signer()
    theirs: MinhashDedupSignature = signer._minhash
    assert theirs.num_hashes == 8 * BUCKETS == MinhashConfig().num_buckets * MinhashConfig().hashes_per_bucket
    monkeypatch.setattr(near, "_SHINGLES", 7)
    assert signer.sign(text).tolist() == whole.tolist()
    hashed = []
    monkeypatch.setattr(near.hashlib, "blake2b", lambda content, **size: hashed.append(content) or Digest())
    signer.sign(text)
    minima = [np.array(bucket, dtype=np.uint64).tobytes() for bucket in theirs.get_signature(theirs.get_shingles(text))]
    assert hashed == minima
    assert not signer.sign("four words are few").any()


class Digest:
    def digest(self) -> bytes:
        return bytes(8)


@pytest.fixture
def preparation(tmp_path) -> Preparation:
    """60 texts of 200 words in two files; every third has a near copy in the other, every tenth a copy there."""
    random = np.random.default_rng(0)
    files: list[list[dict[str, str]]] = [[], []]
    for number in range(60):
        words = ["".join(pair) for pair in random.choice(list("abcdefgh"), (200, 2))]  # numbers count as one word
        files[number % 2].append({"text": " ".join(words)})
        if number % 10 == 0:
            files[1 - number % 2].append({"text": " ".join(words)})
        if number % 3 == 0:
            files[1 - number % 2].append({"text": " ".join([*words[:100], "zz", *words[101:]])})
    for name, records in zip("ab", files, strict=True):
        write_jsonl(tmp_path / f"{name}.jsonl", records)
    data = DataConfig(sources=[Source(files=f"{tmp_path}/?.jsonl")], cache=f"{tmp_path}/cache", near_duplicates=True)
    return Preparation(
        tokenizer=TokenizerConfig(source="none"), data=data, prepare=PrepareConfig(workers=1, task_bytes=1)
    )


def test_no_near_duplicate_of_what_is_held_out_is_trained_on(preparation, tmp_path):
    store = produce(preparation, tiny_tokenizer(), tmp_path / "out")
    assert isinstance(store, TokenStore)
    assert len(store.shards) == 2
    assert (store.copies, store.near_copies) == (6, 20)
    told = statistics_of(store, [64])
    assert (told.copies, told.near_copies) == (6, 20)
    for seed in range(20):
        split = split_documents(store, 0.2, seed)
        texts = [{tuple(store.document(i)[:100]) for i in side} for side in (split.train, split.held_out)]
        assert not texts[0] & texts[1]
        assert split.moved
    # One process that tokenises in a run finds the same.
    plain = prepare(preparation.data, tiny_tokenizer())
    assert plain.signatures is not None
    np.testing.assert_array_equal(plain.signatures, store.signatures)
    # Where nobody asked there is no such file, and the store is what it always was.
    other = prepare(preparation.data.model_copy(update={"near_duplicates": False}), tiny_tokenizer())
    assert (other.signatures, other.near_copies, other.copies) == (None, 0, 6)
    assert other.header.sha256 == plain.header.sha256
    assert not (other.folder / "signatures.npy").exists()
