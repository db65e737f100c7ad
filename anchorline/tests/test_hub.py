"""Finding a model in a folder, on a hub or in its cache. The hub is a stand-in, or a port that never answers."""

import socket
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import huggingface_hub.constants
import pytest

from anchorline import hub
from anchorline.errors import UserError

FILES = ("config.json", *hub.WEIGHTS)


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)


def refused(source: str) -> str:
    with pytest.raises(UserError) as error:
        hub.find_model(source, "model.source", FILES)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_hub_that_never_answers(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", f"http://127.0.0.1:{listening.getsockname()[1]}")
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{listening.getsockname()[1]}")
        assert refused("nobody/nothing") == (
            "model.source 'nobody/nothing': no folder with a config.json here, and the hub cannot be reached: "
            "the hub did not answer in time; give the folder of a model, or smollm2"
        )


def test_a_folder_is_taken_without_asking_and_one_without_a_model_is_refused(tmp_path):
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert hub.find_model("model", "model.source", FILES) == Path("model")
    assert "is there, but has no config.json" in refused("other")


@pytest.mark.parametrize("source", ["../x", "a/b/c", "a b", "~nobody-at-all/x", "x" * 5000, "-x", "", "é/x"])
def test_a_name_that_cannot_be_an_id_is_never_asked_for(monkeypatch, source):
    monkeypatch.setattr(hub, "_from_hub", None)
    assert refused(source).startswith("model.source ")


def test_only_the_files_that_are_needed_are_downloaded_and_the_cache_is_used_later(monkeypatch, tmp_path):
    names, downloads, lines = ["config.json", "model.safetensors", "a/config.json"], [], []
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").touch()

    def download(source, allow_patterns, local_files_only=False):
        downloads.append(allow_patterns)
        return str(copy)

    def no_answer(self, source, timeout):
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=name) for name in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda self, source, timeout: info)
    assert hub.find_model("tiny/model", "model.source", ("*.json",), lines.append) == copy
    assert downloads == [["config.json"]]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_answer)
    assert hub.find_model("tiny/model", "model.source", ("*.json",), lines.append) == copy
    assert lines[-1].startswith("warning   tiny/model: the hub did not answer in time; taken from the cache, ")
    assert "the hub cannot be reached" in refused("tiny/model")  # its weights are not in the cache
