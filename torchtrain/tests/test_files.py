"""Which files a pattern means, and what each of them gives, however it is packed and damaged."""

import contextlib
import glob
import gzip
import io
import json
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anchorline.errors import UserError
from torchtrain.config import Source
from torchtrain.data import files
from torchtrain.data.corpus import BadRecord, Document, read
from torchtrain.data.files import find_files, items

LINES = [json.dumps({"text": f"number {i}"}).encode() + b"\n" for i in range(3000)]


@pytest.fixture
def tree(tmp_path) -> Path:
    for name in ("a.jsonl", "x/b.jsonl", "x/y/c.jsonl", "x/y/.hidden.jsonl", "x/.h/d.jsonl", "z/e.jsonl.zst"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "x", target_is_directory=True)
    return tmp_path


@pytest.mark.parametrize(
    "pattern",
    [
        "*.jsonl",
        "**/*.jsonl",
        "x/**/*.jsonl",
        "**/y/*",
        "x/y/c.jsonl",
        "?/[bc].jsonl",
        "**/.hidden.jsonl",
        "./x/../a.jsonl",
    ],
)
@pytest.mark.parametrize("absolute", [True, False])
def test_a_pattern_means_what_glob_means(tree, monkeypatch, pattern, absolute):
    monkeypatch.chdir(tree)
    pattern = str(tree / pattern) if absolute else pattern
    expected = sorted({Path(name) for name in glob.glob(pattern, recursive=True)})
    assert expected
    assert find_files(pattern) == expected


def test_a_loop_of_links_is_left(tree):
    (tree / "x" / "up").symlink_to(tree, target_is_directory=True)
    found = find_files(str(tree / "**" / "*.jsonl"))
    assert {path.resolve() for path in found} == {tree / "a.jsonl", tree / "x/b.jsonl", tree / "x/y/c.jsonl"}


def test_only_regular_files_are_read_and_the_first_other_ends_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MOST_NAMES", 1000)
    with pytest.raises(
        UserError, match=r"^data\.sources: .*proc.* is not a regular .* file; narrow files '/proc/self/\*\*'$"
    ):
        find_files("/proc/self/**")
    with pytest.raises(
        UserError, match=r"files '/proc/\*\*/\*\.jsonl': more than 1,000 names were looked at; let it begin"
    ):
        find_files("/proc/**/*.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"pipe\.jsonl is not a regular"):
        find_files(str(tmp_path / "*.jsonl"))


@pytest.mark.parametrize("pattern", ["a\0b.jsonl", "x" * 5000, "\udc80.jsonl", "~nobody-at-all/*.jsonl", "[", "**"])
def test_a_pattern_that_means_nothing_is_one_short_line(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        find_files(pattern)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def zst(*parts: bytes) -> bytes:
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


def test_zst_of_many_frames_is_one_content(tmp_path):
    whole = b"".join(LINES)
    skipped = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"hello"
    path = tmp_path / "web-0.jsonl.zst"
    path.write_bytes(zst(whole[:1001]) + skipped + zst(b"", whole[1001:]))
    records = list(read(Source(files=str(path))))
    assert records == [Document(f"number {i}", "web-0") for i in range(3000)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[: len(content) // 2], "Truncated"),
        (lambda content: content[:-2], "Truncated"),
        (lambda content: content + b"more", "Unknown frame"),
        (lambda content: b"plain", "Unknown frame"),
    ],
)
def test_a_zst_file_that_is_cut_off_or_other_is_refused(tmp_path, damage, reason):
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(damage(zst(b"".join(LINES[:1500]), b"".join(LINES[1500:]))))
    with pytest.raises(UserError, match=rf"a\.jsonl\.zst breaks off after line \d+: .*{reason}.*; copy it again"):
        list(items(str(path), {}))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_without_a_byte_was_cut_off(tmp_path, suffix):
    """Beside others it would lose its documents in silence. A plain one may be empty."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert list(read(Source(files=f"{tmp_path}/*.jsonl"))) == []
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(b"")
    with pytest.raises(UserError, match=rf"b\.jsonl\.{suffix} breaks off after line 0: it is empty; copy it again"):
        list(read(Source(files=f"{tmp_path}/*.jsonl*")))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_stream_is_never_sought(monkeypatch, suffix):
    """Over HTTP a file of no told length comes as a stream, which cannot go back."""

    class Stream(io.BytesIO):
        def seek(self, *_):
            raise ValueError("Cannot seek streaming HTTP file")

    content = gzip.compress(b"".join(LINES[:5])) if suffix == "gz" else zst(b"".join(LINES[:5]))
    monkeypatch.setattr(files.remote, "is_url", lambda path: True)
    monkeypatch.setattr(files.remote, "open_url", lambda path: contextlib.closing(Stream(content)))
    with files._open(f"memory://a.jsonl.{suffix}") as file:
        assert file.read() == b"".join(LINES[:5])


def test_a_line_too_long_to_hold_costs_that_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 100)
    path = tmp_path / "a.jsonl"
    lines = ['{"text": "first"}', "x" * 101, json.dumps({"text": "y" * 87}), "z" * 5000]
    path.write_text("\n".join(lines))
    assert len(lines[2]) == 100 - 1  # and its newline
    found = list(read(Source(files=str(path))))
    assert [record.text for record in found if isinstance(record, Document)] == ["first", "y" * 87]
    assert [str(record) for record in found if isinstance(record, BadRecord)] == [
        f"{path}:{number}: is longer than 100 bytes" for number in (2, 4)
    ]


def not_utf8(texts: list[bytes]) -> pa.Array:
    """An Arrow column of strings, which nobody has checked."""
    binary = pa.array(texts, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(binary), binary.buffers())


@pytest.mark.parametrize("nested", [False, True])
def test_a_parquet_string_that_is_not_utf8_costs_its_record(tmp_path, nested):
    texts = [b"good %d" % i for i in range(600)]
    texts[300] = b"bad \xff"
    column, field = not_utf8(texts), "text"
    if nested:
        column, field = pa.StructArray.from_arrays([column], ["body"]), "text.body"
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    source = Source(files=str(tmp_path / "a.parquet"), text_field=field)
    found = list(read(source))
    assert [record.text for record in found if isinstance(record, Document)] == [
        text.decode() for i, text in enumerate(texts) if i != 300
    ]
    assert str(found[300]) == f"{tmp_path}/a.parquet: row 301: is not UTF-8"


def test_a_domain_with_control_characters_is_a_bad_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "t", "d": d}) + "\n" for d in ("web", "we\0b", "we\x1b[31mb")))
    found = list(read(Source(files=str(path), domain_field="d")))
    assert [type(record) for record in found] == [Document, BadRecord, BadRecord]
    assert str(found[1]) == f"{path}:2: 'd' holds control characters"


def test_without_pyarrow_a_zst_file_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl.zst").write_bytes(zst(*LINES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"needs the package datasets: pip install 'anchorline\[torch\]'"):
        list(read(Source(files=str(tmp_path / "a.jsonl.zst"))))
