"""Where a model is looked for, and for how long: a local hub that never answers, that knows nothing."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from anchorline import hub
from anchorline.errors import UserError

ANSWER = 0.5  # seconds, in place of the real ones
AT_MOST = 15.0  # of a busy machine, importing huggingface_hub; without bounds it was 23 to 420 s
FILES = ("config.json", *hub.WEIGHTS)


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    import huggingface_hub.constants

    monkeypatch.setattr(hub, "ANSWER_SECONDS", ANSWER)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def endpoint(monkeypatch):
    """Return a function that makes a port of this machine the hub."""
    import huggingface_hub.constants

    def set_to(port: int) -> None:
        address = f"http://127.0.0.1:{port}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        )
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", address)

    return set_to


@pytest.fixture
def silent() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


class _Hub(BaseHTTPRequestHandler):
    """Knows tiny/model. It notes whether anyone asks for the weights."""

    def do_GET(self) -> None:
        if self.path.split("/revision/")[0] == "/api/models/tiny/model":
            self._send(
                json.dumps(
                    {
                        "id": "tiny/model",
                        "sha": "0" * 40,
                        "siblings": [
                            {"rfilename": "config.json"},
                            {"rfilename": "model.safetensors"},
                            {"rfilename": "a/config.json"},
                        ],
                    }
                ).encode()
            )
        elif self.path.startswith("/api/models/tiny/model/tree/"):
            names = ["config.json", "model.safetensors"]
            self._send(json.dumps([{"type": "file", "path": n, "size": 2, "oid": "abc"} for n in names]).encode())
        elif self.path.endswith("config.json"):
            self._send(b"{}")
        elif self.path.endswith("model.safetensors"):
            self.server.asked.set()  # type: ignore[attr-defined]
            self._send(b"{}")
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        for name, value in (("Content-Length", str(len(body))), ("ETag", '"abc"'), ("X-Repo-Commit", "0" * 40)):
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def answering(endpoint) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hub) as server:
        server.daemon_threads = True
        server.asked = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint(server.server_address[1])
        yield server
        server.shutdown()


def refused(source: str, patterns=FILES) -> str:
    started = time.monotonic()
    with pytest.raises(UserError) as error:
        hub.find_model(source, "model.source", patterns)
    assert time.monotonic() - started < AT_MOST
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_hub_that_never_answers(endpoint, silent):
    endpoint(silent)
    message = refused("nobody/nothing")
    assert message == (
        "model.source 'nobody/nothing': no folder with a config.json here, and no id that can be reached: "
        "the hub did not answer in time; give a folder, or another id"
    )


def test_a_folder_without_a_model_is_no_id(tmp_path):
    (tmp_path / "other").mkdir()
    assert "is there, but is not a folder with a config.json" in refused("other")


@pytest.mark.parametrize(
    "source", ["../x", "a/b/c", "a b", "~nobody-at-all/x", "x" * 300, "x" * 5000, "-x", "a/", "", "é/x"]
)
def test_what_cannot_be_an_id_is_never_asked_for(monkeypatch, source):
    monkeypatch.setattr(hub, "_from_hub", None)
    assert refused(source).startswith("model.source ")


def test_a_hub_that_knows_no_such_model(answering):
    assert "the hub has none of that name, or not for you" in refused("nobody/nothing")


def test_what_is_asked_for_alone_is_fetched_and_found_again(answering, endpoint, silent):
    told: list[str] = []
    folder = hub.find_model("tiny/model", "model.source", ("*.json",), told.append)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert not answering.asked.is_set()
    endpoint(silent)
    assert hub.find_model("tiny/model", "model.source", ("*.json",), told.append) == folder
    assert told[-1].startswith("warning   tiny/model: the hub did not answer in time; taken from the cache, ")


def test_a_folder_is_taken_without_asking(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").touch()
    assert hub.find_model("m", "model.source", FILES) == Path("m")
