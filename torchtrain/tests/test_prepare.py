"""Tokenising: what is stored, what is reused, and that nothing is ever half there."""

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from anchorline.errors import UserError
from torchtrain.config import DataConfig, Source
from torchtrain.data import DomainSummary, PreparationProgress, fingerprint, prepare
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl
from torchtrain.tests.runs import TIME_LIMIT


@pytest.fixture
def corpus(tmp_path):
    """A config over two files of one domain each, with one short document."""
    write_jsonl(tmp_path / "left.jsonl", [{"text": "w0 w1 w2"}, {"text": "w3"}])
    write_jsonl(tmp_path / "right.jsonl", [{"text": "w4 w5"}])
    return config(tmp_path, min_tokens=2)


def config(folder, names=("left", "right"), **settings) -> DataConfig:
    sources = [Source(files=str(folder / f"{name}.jsonl")) for name in names]
    return DataConfig(sources=sources, cache=str(folder / "cache"), **settings)


def stored(tmp_path) -> list[str]:
    """Return what stands in the cache, lock files aside."""
    folder = tmp_path / "cache" / "corpus"
    return sorted(name for name in os.listdir(folder) if not name.endswith(".lock")) if folder.exists() else []


def test_documents_are_stored_in_order_with_eos(corpus, tmp_path):
    seen = []
    store = prepare(corpus, word_tokenizer(), seen.append)
    assert [store.document(i).tolist() for i in range(len(store))] == [[3, 4, 5, 2], [7, 8, 2]]
    assert store.lengths.tolist() == [4, 3]
    assert store.domains == ["left", "right"]
    assert store.document_domains.tolist() == [0, 1]
    assert store.header.largest_token == 8
    assert store.header.summaries == [DomainSummary("left", 1, 4, 4, 0, 1, 1), DomainSummary("right", 1, 3, 3, 0, 0, 0)]
    assert seen[-1] == PreparationProgress("tokenised", documents=2, tokens=7, bad_records=0)
    assert [progress.state for progress in seen] == ["tokenising left", "tokenising right", "tokenised"]
    assert str(seen[-1]) == "tokenised: 2 documents, 7 tokens, 0 bad records"
    assert stored(tmp_path) == [store.header.fingerprint]


def test_a_document_longer_than_the_model_is_no_warning(tmp_path, caplog):
    write_jsonl(tmp_path / "long.jsonl", [{"text": "w1 " * 5000}])
    tokenizer = word_tokenizer()
    tokenizer.model_max_length = 100
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store = prepare(config(tmp_path, ["long"]), tokenizer)
    assert store.lengths.tolist() == [5001]
    assert not caplog.records


def test_a_finished_store_is_reused_without_tokenising_and_says_so(corpus, monkeypatch):
    tokenizer = word_tokenizer()
    first = prepare(corpus, tokenizer)
    monkeypatch.setattr(type(tokenizer), "__call__", lambda *_, **__: pytest.fail("tokenised again"))
    seen = []
    second = prepare(corpus, tokenizer, seen.append)
    assert seen == [PreparationProgress("tokens reused", documents=2, tokens=7, bad_records=0)]
    np.testing.assert_array_equal(second.shards[0], first.shards[0])


def test_fingerprint_changes_with_what_the_tokens_depend_on(corpus, tmp_path, monkeypatch):
    def variant(**changes):
        return fingerprint(corpus.model_copy(update=changes), word_tokenizer())

    source = corpus.sources[0]
    seen = [variant()]
    seen.append(variant(append_eos=False))
    seen.append(variant(min_tokens=1))
    seen.append(variant(sources=[source]))
    seen.append(variant(sources=corpus.sources[::-1]))
    for change in ({"text_field": "body"}, {"domain": "x"}, {"domain_field": "x"}, {"max_documents": 1}):
        seen.append(variant(sources=[source.model_copy(update=change)]))
    seen.append(variant(sources=[Source(dataset="a/b")]))
    seen.append(variant(sources=[Source(dataset="a/b", revision="c")]))
    seen.append(fingerprint(corpus, word_tokenizer(words=51)))
    seen.append(fingerprint(corpus, word_tokenizer(eos="w1")))
    seen.append(variant(sources=[Source(demo="code")]))
    monkeypatch.setattr(sys, "version", "another Python")
    seen.append(variant(sources=[Source(demo="code")]))
    folder = [Source(dataset=str(tmp_path))]
    seen.append(variant(sources=folder))
    write_jsonl(tmp_path / "left.jsonl", [{"text": "w0 w1 w2"}, {"text": "w4"}])
    seen.append(variant(sources=folder))
    seen.append(variant())
    assert len(set(seen)) == len(seen)


def test_fingerprint_stays_with_what_they_do_not_depend_on(corpus):
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "w0"
    name = fingerprint(corpus, tokenizer)
    changes = {"cache": "elsewhere", "bad_record_share": 0.5, "held_out_share": 0.5}
    assert fingerprint(corpus.model_copy(update=changes), tokenizer) == name
    # Padding and truncation are state that calls leave in the tokenizer.
    tokenizer(["w1", "w1 w2"], padding=True, truncation=True, max_length=1)
    assert fingerprint(corpus, tokenizer) == name


def test_bad_records_are_counted_noted_and_refused_past_the_share(tmp_path):
    lines = [json.dumps({"text": "w1 w2"})] * 8 + ["{broken", json.dumps({"no": 1})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    lenient = config(tmp_path, ["a"], bad_record_share=0.2)
    store = prepare(lenient, word_tokenizer())
    assert len(store) == 8
    assert store.header.summaries[0].bad_records == 2
    noted = store.bad_records.read_text().splitlines()
    assert [line.split(": ")[0] for line in noted] == [f"{tmp_path}/a.jsonl:9", f"{tmp_path}/a.jsonl:10"]

    message = (
        r"a: 2 of 10 records are bad, a share above data.bad_record_share 0.1; the first: .*a.jsonl:9: is not JSON"
    )
    strict = config(tmp_path, ["a"], bad_record_share=0.1)
    # A finished store made under a larger share does not get around the smaller one.
    with pytest.raises(UserError, match=message):
        prepare(strict, word_tokenizer())
    with pytest.raises(UserError, match=message):
        prepare(strict.model_copy(update={"cache": str(tmp_path / "new")}), word_tokenizer())
    assert stored(tmp_path / "new") == []


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no records; check"),
        ([{"text": "w1"}, {"text": ""}], "2 records: 1 bad, 1 filtered or shorter than data.min_tokens 2; check"),
    ],
)
def test_an_empty_corpus_is_refused(tmp_path, records, message):
    write_jsonl(tmp_path / "a.jsonl", records)
    with pytest.raises(UserError, match=f"the corpus is empty: {message}"):
        prepare(config(tmp_path, ["a"], min_tokens=2, bad_record_share=0.5), word_tokenizer())
    assert stored(tmp_path) == []


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing_and_the_next_attempt_works(corpus, tmp_path, interruption):
    def interrupt(progress):
        raise interruption

    with pytest.raises(interruption):
        prepare(corpus, word_tokenizer(), interrupt)
    assert stored(tmp_path) == []
    # A process that was killed outright could not tidy up.
    partial = tmp_path / "cache" / "corpus" / f"{fingerprint(corpus, word_tokenizer())}.partial"
    partial.mkdir()
    (partial / "tokens-00000.bin").write_bytes(b"half")
    store = prepare(corpus, word_tokenizer())
    assert store.lengths.tolist() == [4, 3]
    assert stored(tmp_path) == [store.header.fingerprint]


@pytest.mark.sweep
def test_two_processes_at_once_make_one_store(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"w{i % 50} w1"} for i in range(20_000)])
    script = (
        "import time\n"
        "from pathlib import Path\n"
        "from torchtrain.data import prepare\n"
        "from torchtrain.tests.data_fixtures import word_tokenizer\n"
        "from torchtrain.tests.test_prepare import config\n"
        f"data = config(Path({str(tmp_path)!r}), ['a'])\n"
        "states = []\n"
        "def note(progress):\n"
        "    states.append(progress.state)\n"
        "    time.sleep(1)  # so that the other comes in between\n"
        "store = prepare(data, word_tokenizer(), note)\n"
        "print(states[-1], len(store), int(store.shards[0].astype(int).sum()))\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    expected = f"20000 {sum(i % 50 + 3 + 4 + 2 for i in range(20_000))}"
    assert sorted(out.strip() for out, _ in outputs) == [f"tokenised {expected}", f"tokens reused {expected}"]
    assert len(stored(tmp_path)) == 1


def test_a_slow_tokenizer_is_refused(corpus):
    class Slow:
        is_fast = False
        eos_token_id = 2

    with pytest.raises(UserError, match=r"model.source: Slow is a slow tokenizer"):
        prepare(corpus, Slow())  # type: ignore[arg-type]
