"""Data sets by name: the disk is looked at first, the hub is asked once, and whoever waits is told why in a line."""

import socket
import threading
import time

import datasets
import pytest

from anchorline.errors import UserError
from torchtrain.config import Source
from torchtrain.data import hub
from torchtrain.data.corpus import read


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
        monkeypatch.setattr(hub, "_SECONDS", 0.5)
        yield held
        server.shutdown(socket.SHUT_RDWR)
    for connection in held:
        connection.close()


@pytest.mark.parametrize("streaming", [True, False])
def test_a_hub_that_never_answers_is_one_line(silent_hub, streaming, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        list(read(Source(dataset="owner/set", streaming=streaming)))
    assert silent_hub
    assert time.monotonic() - began < 30  # datasets alone: 240 s
    message = str(caught.value)
    assert message.startswith("data.sources: dataset 'owner/set': the hub gave no answer within ")
    assert f"there is no such folder (from {tmp_path}), nor does datasets' cache hold" in message
    assert message.isprintable()


@pytest.mark.parametrize("name", ["./missing", "/no/such/place", "a/b/c", "x" * 1000, "a b"])
def test_a_path_that_is_not_there_does_not_go_to_the_hub(silent_hub, name):
    with pytest.raises(
        UserError, match=r"there is no such folder \(from .*\), and a hub id is a name such as owner/set"
    ):
        list(read(Source(dataset=name)))
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
    assert hub.count_shards(Source(dataset=str(tmp_path / "splits"))) == 1
    with pytest.raises(UserError, match=r"split 'dev'\) cannot be read after record 0: it has no split 'dev', but "):
        texts(dataset=str(tmp_path / "splits"), split="dev")
    with pytest.raises(UserError, match="cannot be read after record 0"):
        texts(dataset=str(tmp_path / "splits"), subset="../sets/alone")
    next((tmp_path / "splits" / "train").glob("*.arrow")).write_bytes(b"cut")
    with pytest.raises(UserError, match="cannot be read after record 0"):
        texts(dataset=str(tmp_path / "splits"))


def test_what_made_a_data_set_unreadable_is_told(tmp_path):
    """datasets' last word is that an error occurred; which it was stands in its cause."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(UserError, match=r"cannot be read after record 0: An error occurred .*\(.*JSON") as raised:
        list(hub.dataset_items(Source(dataset=str(tmp_path / "set"))))
    assert "\n" not in str(raised.value)
