"""Which files a pattern means, what each of them and each data set gives, and how one that is broken is named."""

import contextlib
import glob
import gzip
import io
import json
import re
import socket
import threading
import zipfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from anchorline.errors import UserError
from torchtrain.config import Source
from torchtrain.data import files
from torchtrain.data.corpus import BadRecord, Document, list_parts, read, source_name
from torchtrain.data.files import count_shards, items, list_files
from torchtrain.evaluation.suite import load_suite
from torchtrain.tests.data_fixtures import write_jsonl
from torchtrain.tests.tiny import refused

LINES = [json.dumps({"text": f"number {i}"}).encode() + b"\n" for i in range(3000)]
RECORDS = [{"text": f"w{i} w{i % 7}", "meta": {"set": f"S{i % 2}"}} for i in range(30)]


def zst(*parts: bytes) -> bytes:
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


def refusal(source: Source) -> str:
    message = refused(lambda: list(read(source)))
    assert message.startswith("data.sources: ")
    assert message.isprintable()
    return message


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
    assert [Path(file.place) for file in list_files(pattern)] == expected


ODD_NAMES = ["texts[1]", "q?", "s*", "[!a]", "c::d", "http::x", "x\ny", "l [b]\t", "**b", "b[2].jsonl"]


@pytest.mark.parametrize("kind", ["files", "texts", "file://"])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_path_that_exists_is_that_path(tmp_path, monkeypatch, name, kind):
    """Beside it are what it matches as a pattern, and what fsspec would take it for."""
    monkeypatch.chdir(tmp_path)
    for place in (name, "texts1", "qa", "sa", "b", "cd", "l b\t", "lb", "b2.jsonl"):
        path = Path(place) / "a.jsonl" if not place.endswith(".jsonl") else Path(place)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": place}))
    own = name if name.endswith(".jsonl") else f"{name}/a.jsonl"
    folder = f"./{Path(own).parent}"
    patterns = {own, str(tmp_path / own), f"./{own}", f"{folder}/*.jsonl", f"{glob.escape(folder)}/**/a.jsonl"}
    if name.endswith(".jsonl"):
        patterns = {own, str(tmp_path / own), glob.escape(own)}
    if kind == "file://":
        patterns = {f"file://{tmp_path / own}"} if "::" not in name else set()
    for pattern in patterns:
        (file,) = list_files(pattern)
        source = Source(**{"texts" if kind == "texts" else "files": pattern})
        (document,) = read(source)
        assert (json.loads(document.text)["text"] if kind == "texts" else document.text) == name, pattern
        assert file.name == Path(own).name
        assert document.domain.isprintable()


def test_sources_of_odd_names_have_their_own_domains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a[1].jsonl", "a[2].jsonl"):
        Path(name).write_text("")
    names = ("a[1].jsonl", "a[2].jsonl", "q[?]/*.jsonl", "t[[]1]/*", "b[12]/*.jsonl")
    assert [source_name(Source(files=name)) for name in names] == ["a[1]", "a[2]", "q?", "t[1]", "b"]


@pytest.mark.parametrize("name", ["set[1]", "q?", "s*", "c::d", "x\ny"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_that_datasets_would_read_as_a_pattern_is_refused(tmp_path, name, streaming):
    for place in (name, "set1", "qa", "sa"):
        (tmp_path / place).mkdir()
        write_jsonl(tmp_path / place / "train.jsonl", [{"text": place}])
    message = refusal(Source(dataset=str(tmp_path / name), streaming=streaming))
    assert "in a path as a pattern; rename the folder" in message
    (tmp_path / "suite.yaml").write_text(json.dumps({"tasks": ["mmlu"], "data": {"mmlu": str(tmp_path / name)}}))
    with pytest.raises(UserError, match=r"data\.mmlu .*; rename the folder"):
        load_suite(tmp_path / "suite.yaml")


def test_a_loop_of_links_is_left(tree):
    (tree / "x" / "up").symlink_to(tree, target_is_directory=True)
    found = [file.place for file in list_files(str(tree / "**" / "*.jsonl"))]
    assert sorted(found) == sorted(f"{tree}/{name}.jsonl" for name in ("a", "x/b", "x/y/c", "link/b", "link/y/c"))


@pytest.mark.parametrize("pattern", ["a\0b.jsonl", "x" * 5000, "\udc80.jsonl", "~nobody-at-all/*.jsonl", "[", "**"])
def test_a_pattern_that_means_nothing_is_one_short_line(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    message = refused(lambda: list_files(pattern))
    assert message.isprintable()
    assert len(message) < 500


@pytest.fixture
def corpus(tmp_path) -> Path:
    """The same records in every kind of file, in a folder and in an archive."""
    folder, lines = tmp_path / "corpus", "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    (folder / "in").mkdir(parents=True)
    (folder / "in" / "a.jsonl").write_bytes(lines)
    (folder / "in" / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "in" / "a.jsonl.zst").write_bytes(zst(lines))
    pq.write_table(pa.Table.from_pylist(RECORDS), folder / "in" / "a.parquet")
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for path in (folder / "in").iterdir():
            archive.write(path, f"in/{path.name}")
    return folder


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
@pytest.mark.parametrize(
    "place", ["{corpus}/in/*.", "file://{corpus}/in/*.", "zip://in/*.{kind}::file://{corpus}/all.zip"]
)
def test_every_kind_of_file_is_read_wherever_it_lies(corpus, kind, place):
    pattern = place.format(corpus=corpus, kind=kind)
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
        ("file://{corpus}/in/*.json", r"matches no file; check the path"),
        ("file://{corpus}/*.zip", r"all\.zip' is not a regular \.jsonl, .* file; narrow files"),
        ("zip://in/*.jsonl::file://{corpus}/in/a.jsonl", r"cannot be listed: File is not a zip file"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_line(corpus, pattern, message):
    assert re.search(message, refused(lambda: list(read(Source(files=pattern.format(corpus=corpus))))))


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
    with pytest.raises(
        UserError, match=rf"a\.jsonl\.zst breaks off after line \d+: .*{reason}.*; check it, or copy it again"
    ):
        list(items(str(path), {}))


@pytest.mark.parametrize(("window", "frames"), [(27, 1), (28, 0), (28, 2), (31, 1)])
def test_a_zst_file_with_a_long_window_is_read_or_says_how_to_pack_it_again(tmp_path, window, frames):
    path, plain = tmp_path / "a.jsonl.zst", b"".join(LINES[:5])
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=window)
    long = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # of unknown size: keeps its window
    path.write_bytes(zst(*[plain] * frames) + long.compress(plain) + long.flush())
    if window == 27:
        assert len(list(items(str(path), {}))) == 10
    else:
        said = refused(lambda: list(items(str(path), {})))
        assert said.startswith(f"data.sources: {path} was packed with a window of more than 128 MiB (zstd --long); ")


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_file_without_a_byte_was_cut_off(tmp_path, suffix):
    """Beside others it would lose its documents in silence. A plain one may be empty."""
    (tmp_path / "a.jsonl").write_bytes(b"")
    assert list(read(Source(files=f"{tmp_path}/*.jsonl"))) == []
    (tmp_path / f"b.jsonl.{suffix}").write_bytes(b"")
    with pytest.raises(
        UserError, match=rf"b\.jsonl\.{suffix} breaks off after line 0: it is empty; check it, or copy it again"
    ):
        list(read(Source(files=f"{tmp_path}/*.jsonl*")))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_compressed_stream_is_never_sought(monkeypatch, suffix):
    """Over HTTP a file of no told length comes as a stream, which cannot go back."""

    class Stream(io.BytesIO):
        def seek(self, *_):
            raise ValueError("Cannot seek streaming HTTP file")

    content = gzip.compress(b"".join(LINES[:5])) if suffix == "gz" else zst(b"".join(LINES[:5]))
    monkeypatch.setattr(files.fsspec, "open", lambda *_: contextlib.closing(Stream(content)))
    assert len(list(items(f"http://host/a.jsonl.{suffix}", {}))) == 5


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


# --- data sets --------------------------------------------------------------------------------------------------------


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


@pytest.fixture
def silent_hub(monkeypatch):
    """A hub that accepts and never answers."""
    held = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            while True:
                try:
                    held.append(server.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(files, "_HUB_SECONDS", 0.5)
        yield held
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


def test_a_hub_that_never_answers_is_one_line(silent_hub):
    message = refusal(Source(dataset="owner/set"))
    assert silent_hub
    assert message.startswith("data.sources: dataset 'owner/set': there is no such folder (from ")
    assert "or read datasets' cache (HF_HUB_OFFLINE=1)" in message


@pytest.mark.parametrize("name", ["./missing", "/no/such/place", "a/b/c", "x" * 1000, "a b"])
def test_a_path_that_is_not_there_does_not_go_to_the_hub(silent_hub, name):
    assert "there is no such folder (from " in refusal(Source(dataset=name))
    assert not silent_hub


def test_a_file_is_not_a_data_set(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"is a file; give it as files"):
        list(read(Source(dataset=str(tmp_path / "a.jsonl"))))


@pytest.mark.parametrize("streaming", [True, False])
def test_what_save_to_disk_left_is_read(tmp_path, streaming):
    rows = datasets.Dataset.from_dict({"text": ["one", "two", "three"]})
    datasets.DatasetDict(train=rows, test=rows.select([2])).save_to_disk(tmp_path / "splits")
    rows.save_to_disk(tmp_path / "sets" / "alone")

    def texts(**settings):
        return [of.text for of in read(Source(streaming=streaming, **settings))]

    assert texts(dataset=str(tmp_path / "splits")) == ["one", "two", "three"]
    assert texts(dataset=str(tmp_path / "splits"), split="test") == ["three"]
    assert texts(dataset=str(tmp_path / "sets"), subset="alone") == ["one", "two", "three"]
    assert count_shards(Source(dataset=str(tmp_path / "splits"))) == 1
    with pytest.raises(UserError, match=r"split 'dev'\) cannot be read after record 0: it has no split 'dev', but "):
        texts(dataset=str(tmp_path / "splits"), split="dev")
    with pytest.raises(UserError, match="cannot be read after record 0"):
        texts(dataset=str(tmp_path / "splits"), subset="../sets/alone")
    next((tmp_path / "splits" / "train").glob("*.arrow")).write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot be read after record 0"):
        texts(dataset=str(tmp_path / "splits"))


def test_what_made_a_data_set_unreadable_is_said(tmp_path):
    """datasets' last error says that one occurred; its cause says which."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    message = refusal(Source(dataset=str(tmp_path / "set")))
    assert "cannot be read after record 0: An error occurred" in message
    assert "JSON" in message
