"""Where documents may lie, how a sample of them is drawn, and that whatever is bad is named and counted."""

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anchorline.errors import UserError
from torchtrain.config import DataConfig, Preparation, PrepareConfig, Source, TokenizerConfig
from torchtrain.data import TokenStore
from torchtrain.data.corpus import BadRecord, Document, list_parts, read
from torchtrain.data.produce import produce
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl

RECORDS = [{"text": f"w{i} w{i % 7}", "meta": {"set": f"S{i % 2}"}} for i in range(30)]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.fixture
def tree(tmp_path) -> Path:
    """The same records in every kind of file, in a folder and in an archive."""
    folder = tmp_path / "tree"
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a.jsonl").write_bytes(LINES)
    (folder / "in" / "a.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "in" / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(LINES))
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "in" / "a.parquet")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for path in (folder / "in").iterdir():
            archive.write(path, f"in/{path.name}")
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize("place", ["{tree}/in/*.", "file://{tree}/in/*.", "zip://in/*.{kind}::file://{tree}/all.zip"])
def test_every_kind_of_file_is_read_wherever_it_lies(tree, kind, place):
    pattern = place.format(tree=tree, kind=kind)
    pattern += "" if "::" in place else kind
    source = Source(files=pattern, domain_field="meta.set", rename={"S1": "second"})
    expected = [Document(r["text"], {"S0": "S0", "S1": "second"}[r["meta"]["set"]]) for r in RECORDS]
    assert list(read(source)) == expected
    (part,) = list_parts(source)
    assert list(read(source, part)) == expected
    assert part.bytes > 0


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("nowhere://bucket/*.jsonl", r"files 'nowhere://bucket/\*\.jsonl' cannot be listed: .*nowhere"),
        ("file://{tree}/in/*.json", r"matches no file; check the URL"),
        ("file://{tree}/*.zip", r"all\.zip' is not a \.jsonl, .* file; narrow files"),
        ("zip://in/*.jsonl::file://{tree}/in/a.jsonl", r"cannot be listed: File is not a zip file"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_line(tree, pattern, message):
    with pytest.raises(UserError, match=message) as caught:
        list(read(Source(files=pattern.format(tree=tree))))
    assert "\n" not in str(caught.value)


def test_a_compressed_file_behind_a_url_that_breaks_off_is_named(tree):
    (tree / "cut.jsonl.gz").write_bytes(gzip.compress(LINES)[:-9])
    with pytest.raises(UserError, match=r"cut\.jsonl\.gz' breaks off after line \d+: .*; copy it again"):
        list(read(Source(files=f"file://{tree}/cut.*")))


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


def test_bad_records_of_every_kind_are_named_and_counted_in_every_task(tmp_path, monkeypatch):
    """What datatrove's readers drop in silence, or end a file at: empty documents, bytes that are no text, others."""
    bad = [
        b"{broken",
        b"[1, 2]",
        b'{"text": 5}',
        b'{"text": ""}',
        b'{"text": "  \\n"}',
        b'{"text": null}',
        b'{"other": "w1"}',
        b'{"text": "\xff"}',
        b'{"text": "w1"}\0',
        b'{"text": "\\ud800"}',
    ]
    good = [b'{"text": "w1 w2"}', b'{"text": "w1 \\u0000 w2"}']
    for number in range(2):
        (tmp_path / f"{number}.jsonl").write_bytes(b"\n".join([good[0], *bad, good[1]]) + b"\n")
    data = DataConfig(sources=[Source(files=f"{tmp_path}/*.jsonl")], cache=str(tmp_path), bad_record_share=0.9)
    monkeypatch.setattr("torchtrain.data.tasks.TASK_BYTES", 1)
    settings = PrepareConfig(workers=1)
    preparation = Preparation(tokenizer=TokenizerConfig(source="none"), data=data, prepare=settings)
    store = produce(preparation, word_tokenizer(), tmp_path / "out")
    assert isinstance(store, TokenStore)
    (count,) = store.header.sources
    assert (count.records, count.bad_records, len(store)) == (24, 20, 4)
    noted = store.bad_records.read_text().splitlines()
    assert [line.split(": ")[0] for line in noted] == [
        f"{tmp_path}/{number}.jsonl:{line}" for number in range(2) for line in range(2, 12)
    ]
    assert store.header.summaries[0].bad_records == 20


def test_a_document_of_megabytes_is_one_document(tmp_path):
    text = ("w" * 999 + " ") * 5_000
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    data = DataConfig(sources=[Source(files=f"{tmp_path}/a.jsonl")], cache=str(tmp_path))
    preparation = Preparation(tokenizer=TokenizerConfig(source="none"), data=data, prepare=PrepareConfig(workers=1))
    store = produce(preparation, word_tokenizer(), tmp_path / "out")
    assert isinstance(store, TokenStore)
    assert store.lengths.tolist() == [len(text.split()) + 1]
