"""Files of a bucket and of the hub: fsspec's own clients read them from a small server of this machine."""

import gzip
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem

from anchorline.errors import UserError
from torchtrain.config import DataConfig, Preparation, PrepareConfig, Source, TokenizerConfig
from torchtrain.data import TokenStore, prepare_store
from torchtrain.data.corpus import Document, read
from torchtrain.tests.data_fixtures import word_tokenizer

RECORDS = [{"text": f"w{i} w{i % 7}", "kind": f"k{i % 2}"} for i in range(300)]
COMMIT = "0" * 40


def contents() -> dict[str, bytes]:
    """Every kind of file, by its path."""
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()
    table = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS), table)
    return {
        "in/a.jsonl": lines,
        "in/b.jsonl.gz": gzip.compress(lines),
        "in/deep/c.parquet": table.getvalue(),
        "in/cut.jsonl.gz": gzip.compress(lines)[:-20],
    }


class Remote(BaseHTTPRequestHandler):
    """What S3 and the Hugging Face hub answer to who lists and reads `owner/set`, a bucket or a data set."""

    files = contents()
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def answer(self, content: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, content: object) -> None:
        self.answer(json.dumps(content).encode(), Content_Type="application/json")

    def answer_file(self, content: bytes) -> None:
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        digest = hashlib.md5(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "Accept_Ranges": "bytes", "X_Repo_Commit": COMMIT}
        if wanted is None:
            self.answer(content, **headers)
            return
        start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        self.answer(content[start:stop], 206, **headers)

    def do_GET(self) -> None:
        place, query = urlsplit(self.path), parse_qs(urlsplit(self.path).query)
        path = unquote(place.path)
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path in ("/api/datasets/owner/set", "/api/datasets/owner/set/revision/main"):
            self.answer_json({"id": "owner/set", "sha": COMMIT, "siblings": []})
        elif path.startswith("/api/datasets/owner/set/tree/main"):
            folder = path.removeprefix("/api/datasets/owner/set/tree/main").strip("/")
            self.answer_json(self.tree(folder, "true" in query.get("recursive", [""])[0].lower()))
        elif (name := path.removeprefix("/datasets/owner/set/resolve/main/").removeprefix("/bucket/")) in self.files:
            self.answer_file(self.files[name])
        elif path.startswith("/bucket") and "list-type" in query:
            self.answer(self.listing(query.get("prefix", [""])[0], query.get("delimiter", [""])[0]))
        else:
            self.answer(b"", 404)

    do_HEAD = do_POST = do_GET

    def tree(self, folder: str, recursive: bool) -> list[dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        for path, content in self.files.items():
            inside = path.removeprefix(folder).strip("/") if path.startswith(folder) else ""
            name, _, below = inside.partition("/")
            if below:
                own = f"{folder}/{name}".strip("/")
                found[own] = {"type": "directory", "path": own, "oid": "1"}
            if inside and (recursive or not below):
                found[path] = {
                    "type": "file",
                    "path": path,
                    "size": len(content),
                    "oid": hashlib.sha1(content).hexdigest(),
                }
        return list(found.values())

    def listing(self, prefix: str, delimiter: str) -> bytes:
        found: dict[str, str] = {}
        for path, content in self.files.items():
            if not path.startswith(prefix):
                continue
            below, _, rest = path[len(prefix) :].partition("/")
            if delimiter and rest:
                name = f"{prefix}{below}/"
                found[name] = f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
            else:
                found[path] = (
                    f"<Contents><Key>{path}</Key><Size>{len(content)}</Size><ETag>e{len(content)}</ETag></Contents>"
                )
        inside = (
            f"<Name>bucket</Name><Prefix>{prefix}</Prefix><IsTruncated>false</IsTruncated>{''.join(found.values())}"
        )
        return f"<ListBucketResult>{inside}</ListBucketResult>".encode()


@pytest.fixture
def server(monkeypatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Remote) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True, "endpoint_url": address})
        yield
        server.shutdown()
    HfFileSystem.clear_instance_cache()


@pytest.mark.parametrize("place", ["s3://bucket", "hf://datasets/owner/set"])
def test_a_bucket_and_the_hub_are_read_like_a_folder(server, tmp_path, place):
    expected = [Document(record["text"], record["kind"]) for record in RECORDS]
    for pattern in ("in/*.jsonl", "in/b.*", "in/**/*.parquet"):
        assert list(read(Source(files=f"{place}/{pattern}", domain_field="kind"))) == expected, pattern
    for pattern, message in (
        ("in/*.gz", r"cut\.jsonl\.gz' breaks off after line \d+: .*; check it"),
        ("none/*.jsonl", "matches no file"),
    ):
        with pytest.raises(UserError, match=message):
            list(read(Source(files=f"{place}/{pattern}")))
    data = DataConfig(sources=[Source(files=f"{place}/in/[ab].jsonl*")], cache=str(tmp_path))
    preparation = Preparation(tokenizer=TokenizerConfig(source="none"), data=data, prepare=PrepareConfig(workers=1))
    store = prepare_store(preparation, word_tokenizer(), tmp_path / "out")
    assert isinstance(store, TokenStore)
    assert len(store) == 2 * len(RECORDS)
