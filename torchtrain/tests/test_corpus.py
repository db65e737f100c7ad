"""From sources to records: how domains and texts are found, how a sample is drawn, and that bad records are counted."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anchorline.errors import UserError
from torchtrain.config import DataConfig, Preparation, PrepareConfig, Source, TokenizerConfig
from torchtrain.data import TokenStore, prepare, prepare_store
from torchtrain.data.corpus import BadRecord, Document, FilteredRecord, list_parts, read, source_name
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl


def texts(source: Source) -> list[str]:
    return [record.text for record in read(source) if isinstance(record, Document)]


def bad(source: Source) -> list[str]:
    return [str(record) for record in read(source) if isinstance(record, BadRecord)]


def test_a_demo_is_a_source_with_its_name_as_domain():
    records = list(read(Source(demo="code", max_documents=2)))
    assert [type(record) for record in records] == [Document, Document]
    assert {record.domain for record in records} == {"code"}


def test_bad_lines_are_named_by_file_and_line_and_the_rest_goes_on(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'\xef\xbb\xbf{"text": "good 1"}',
        b'{"text": "cut of',
        b"",
        b'{"txt": "misnamed", "id": 1}',
        b'{"text": 5}',
        b'{"text": "  \\n"}',
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"text": null}',
        b'{"\\ud800": 1, "a\\nb\\u001b[31m": 1}',
        json.dumps({f"k{i}": i for i in range(9)}).encode(),
        b'{"text": "good 2"}',
    ]
    path.write_bytes(b"\n".join(lines))
    source = Source(files=str(path))
    assert texts(source) == ["good 1", "good 2"]
    found = bad(source)
    expected = {
        2: "is not JSON: ",
        4: "has no 'text' (it has txt, id; see text_field)",
        5: "'text' is not a string but int",
        6: "'text' is blank",
        7: "is not a JSON object but list",
        8: "is not UTF-8",
        9: "'text' is not valid Unicode",
        10: "is not JSON: ",
        11: "'text' is null",
        12: r"has no 'text' (it has \ud800, a\nb\x1b[31m; see text_field)",
        13: "has no 'text' (it has k0, k1, k2, k3, k4, k5, k6, k7, ...; see text_field)",
    }
    assert len(found) == len(expected)
    for (number, reason), line in zip(expected.items(), found, strict=True):
        assert line.startswith(f"{path}:{number}: {reason}")


def test_a_file_whose_name_is_no_text(tmp_path):
    (tmp_path / os.fsdecode(b"\xff\n.jsonl")).write_text("{broken")
    (line,) = bad(Source(files=str(tmp_path / "*.jsonl")))
    assert line.startswith(rf"{tmp_path}/\udcff\n.jsonl:1: is not JSON: ")


def test_a_bad_record_counts_for_its_domain_where_that_is_known(tmp_path):
    path = write_jsonl(tmp_path / "web.jsonl", [{"text": "", "kind": "news"}, {"text": "fine"}])
    records = list(read(Source(files=str(path), domain_field="kind")))
    assert [(record.domain, type(record)) for record in records] == [("news", BadRecord), ("web", BadRecord)]
    assert "has no 'kind' (it has text; see domain_field)" in str(records[1])


def test_max_documents_counts_good_records(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ""}, {"text": "a"}, {"text": "b"}, {"text": "c"}])
    source = Source(files=str(path), max_documents=2)
    assert texts(source) == ["a", "b"]
    assert len(bad(source)) == 1


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ({"demo": "code"}, "code"),
        ({"dataset": "owner/set"}, "owner/set"),
        ({"files": "x/web.jsonl.gz"}, "web"),
        ({"files": "x/books-*.parquet"}, "books"),
        ({"files": "x/wiki/**/[0-9]*.jsonl"}, "wiki"),
        ({"files": "*.jsonl"}, "files"),
        ({"files": "x/web.jsonl", "domain": "mine"}, "mine"),
    ],
)
def test_a_source_has_a_name(source, name):
    assert source_name(Source(**source)) == name


def test_a_domain_with_control_characters_is_a_bad_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "t", "d": d}) + "\n" for d in ("web", "we\0b", "we\x1b[31mb")))
    found = list(read(Source(files=str(path), domain_field="d")))
    assert [type(record) for record in found] == [Document, BadRecord, BadRecord]
    assert str(found[1]) == f"{path}:2: 'd' holds control characters"


def test_a_folder_of_texts_is_a_document_a_file(tmp_path):
    for folder, name, content in (
        ("b", "x.txt", b"w1 w2"),
        ("a", "y.md", "\ufeffw3 \u00e9".encode()),
        ("a", "z", b"\xff"),
    ):
        (tmp_path / "t" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / folder / name).write_bytes(content)
    source = Source(texts=f"{tmp_path}/t/**", domain_field="folder", rename={"a": "first"})
    assert list(read(source)) == [
        Document("w3 \u00e9", "first"),
        BadRecord(f"{tmp_path}/t/a/z", "is not UTF-8", "t"),
        Document("w1 w2", "b"),
    ]
    assert [len(list(read(source, part))) for part in list_parts(source)] == [1, 1, 1]


def test_a_sample_is_drawn_by_seed_from_all_of_it(tmp_path):
    for number in range(10):
        write_jsonl(tmp_path / f"{number}.jsonl", [{"text": f"w{number} w{i}"} for i in range(200)])
    whole = Source(files=f"{tmp_path}/*.jsonl")
    every = list(read(whole))

    def draw(**settings) -> list[int]:
        return [every.index(record) for record in read(whole.model_copy(update=settings))]

    files = draw(sample_files=0.3)
    assert len(files) == 3 * 200
    assert files == sorted(files)
    assert files == draw(sample_files=0.3) != draw(sample_files=0.3, sample_seed=1)
    records = draw(sample=0.1)
    assert records == draw(sample=0.1) != draw(sample=0.1, sample_seed=1)
    # 2,000 draws at 0.1: five standard deviations of the binomial.
    assert abs(len(records) - 200) < 5 * (2000 * 0.1 * 0.9) ** 0.5
    assert np.histogram(records, bins=10, range=(0, 2000))[0].min() > 0  # from every file, not the first records
    # Of a file that both draw, both draw the same records.
    both = draw(sample_files=0.3, sample=0.1)
    assert set(both) == set(records) & set(files)
    # The first of a sample are of the sample.
    assert draw(sample=0.1, max_documents=5) == records[:5]


FILTERS = [
    {"name": "RegexFilter", "options": {"regex_exp": "w7 "}},
    {"name": "SamplerFilter", "options": {"rate": 0.5, "seed": 3}},
    {"name": "torchtrain.tests.test_corpus.Shout"},
]


class Shout:
    """A block that reads another field and changes the text, and leaves nothing of some."""

    def run(self, data, rank=0, world_size=1):
        for document in data:
            document.text = document.text.upper().replace("W8 W8", " ") + document.metadata["mark"]
            yield document


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_blocks_of_datatrove_drop_and_change_documents_alike_whoever_reads(tmp_path, monkeypatch, kind):
    for number in range(4):
        records = [{"text": f"w{i % 9} w{i % 9}", "mark": "" if i % 9 == 8 else f" {number}"} for i in range(30)]
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(records), tmp_path / f"{number}.parquet")
        else:
            write_jsonl(tmp_path / f"{number}.jsonl", [*records, {"text": None}])
    source = Source.model_validate({"files": f"{tmp_path}/*.{kind}", "filters": FILTERS})
    found = list(read(source))
    assert [record for part in list_parts(source) for record in read(source, part)] == found
    kinds = [type(record) for record in found]
    assert kinds.count(BadRecord) == 4 * (kind == "jsonl")
    kept = [record.text for record in found if isinstance(record, Document)]
    assert 20 < len(kept) < 80
    assert {text[:2] for text in kept} <= {f"W{i}" for i in range(7)}
    assert {text[-1] for text in kept} == set("0123")
    assert kinds.count(FilteredRecord) == 4 * 30 - len(kept)
    monkeypatch.setattr("torchtrain.data.corpus.TASK_BYTES", 1)
    data = DataConfig(sources=[source], cache=f"{tmp_path}/cache", bad_record_share=0.1)
    preparation = Preparation(tokenizer=TokenizerConfig(source="none"), data=data, prepare=PrepareConfig(workers=1))
    store, alone = prepare_store(preparation, word_tokenizer(), tmp_path / "out"), prepare(data, word_tokenizer())
    assert isinstance(store, TokenStore)
    assert store.header.sources == alone.header.sources
    assert store.header.sources[0].records == len(found)
    assert np.array_equal(store.hashes, alone.hashes)
    assert len(store) == len(kept)


def test_short_documents_are_sampled_by_their_text(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{i} " * (1 if i % 2 else 20)} for i in range(400)] * 2)

    def kept(share: float, seed: int = 0) -> list[str]:
        options = {"characters": 40, "share": share, "seed": seed}
        filters = [{"name": "SampleShort", "options": options}]
        return texts(Source.model_validate({"files": str(path), "filters": filters}))

    assert [len(kept(share)) for share in (0, 1)] == [400, 800]
    some = kept(0.1)
    assert some[: len(some) // 2] == some[len(some) // 2 :] != kept(0.1, 1)
    assert abs(len(some) // 2 - 200 - 20) < 5 * (200 * 0.1 * 0.9) ** 0.5  # five standard deviations of the binomial


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "GopherFilter",
            {},
            r"filter 'GopherFilter': is none of datatrove\.pipeline\.filters or .*; give package\.mod",
        ),
        ("no.such.Block", {}, r"filter 'no\.such\.Block': cannot be made: No module named 'no'; correct its name or o"),
        ("LambdaFilter", {"x": 1}, r"filter 'LambdaFilter': cannot be made: .*unexpected keyword argument 'x'"),
        ("SampleShort", {"characters": 9, "share": 2}, r"cannot be made: share 2 is not within 0 and 1"),
        (
            "torchtrain.tests.test_corpus.Shout",
            {},
            r"filter Shout fails at '.*a\.jsonl:1': KeyError: 'mark'; correct or",
        ),
    ],
)
def test_a_filter_that_cannot_be_made_or_fails_is_one_line(tmp_path, name, options, message):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    source = Source.model_validate({"files": str(path), "filters": [{"name": name, "options": options}]})
    with pytest.raises(UserError, match=message):
        prepare(DataConfig(sources=[source], cache=str(tmp_path)), word_tokenizer())
