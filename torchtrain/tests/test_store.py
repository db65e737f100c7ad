"""The store's bytes: what is written is checked, what has changed is found."""

import multiprocessing
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anchorline.errors import UserError
from anchorline.files import FileEntry
from torchtrain.config import DataConfig, Source
from torchtrain.data import TokenStore, fingerprint, prepare
from torchtrain.data.store import BAD_RECORDS, DOMAINS, HASHES, HEADER, OFFSETS
from torchtrain.data.writer import StoreWriter
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl

TOKENS = "tokens-00000.bin"
FILES = (TOKENS, OFFSETS, DOMAINS, HASHES, BAD_RECORDS)


@pytest.fixture
def data(tmp_path) -> DataConfig:
    texts = [f"w{i % 40} w{i % 7} w{i % 11}" for i in range(300)]
    path = write_jsonl(tmp_path / "a.jsonl", [*({"text": text} for text in texts), {"no": "text"}])
    return DataConfig(sources=[Source(files=str(path))], cache=str(tmp_path / "cache"), bad_record_share=0.1)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_found(data, name):
    store = prepare(data, word_tokenizer())
    store.verify()
    path = store.folder / name
    whole = path.read_bytes()
    for place in (0, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        # Seen on opening, or by reading it all.
        with pytest.raises(UserError, match=rf"{store.folder} is damaged \({name}: .*delete the folder") as caught:
            TokenStore.open(store.folder).verify()
        assert str(caught.value).isprintable()
    path.write_bytes(whole)
    TokenStore.open(store.folder).verify()


def test_one_flipped_bit_in_the_header_is_found_on_opening(data):
    folder = prepare(data, word_tokenizer()).folder
    whole = (folder / HEADER).read_bytes()
    for place in range(0, len(whole) - 1, 7):
        (folder / HEADER).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=rf"{folder} (is damaged|holds no finished)"):
            TokenStore.open(folder)


@pytest.mark.parametrize("name", [TOKENS, OFFSETS, DOMAINS, HEADER])
def test_a_pipe_and_a_folder_in_a_files_place_are_refused_at_once(data, name):
    store = prepare(data, word_tokenizer())
    path = store.folder / name
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"is damaged \(.*not a regular file"):
        TokenStore.open(store.folder)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"is damaged"):
        TokenStore.open(store.folder)


# --- writes that fail -------------------------------------------------------------------------------------------------


def write_limited(folder: Path, limit: int, said: Any) -> None:
    """Write a store while no file may grow beyond a size; for a process of its own."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    with StoreWriter(folder) as writer:
        try:
            for _ in range(40):
                writer.add("web", np.arange(1000, dtype=np.int32))
                writer.skip_bad("web", "x" * 100)
            writer.finish("name", [])
        except OSError as error:
            said.send(error.strerror)
        else:
            said.send("finished")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(0, "File too large"), (4_039, "File too large"), (159_999, "File too large"), (160_000, "finished")],
)
def test_a_write_that_fails_is_noticed_wherever_it_does(tmp_path, limit, expected):
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)
    process = fork.Process(target=write_limited, args=(tmp_path, limit, there))
    process.start()
    process.join(60)
    assert here.poll(), process.exitcode
    assert here.recv() == expected
    assert (tmp_path / HEADER).exists() == (expected == "finished")
    if expected == "finished":
        assert {name: (tmp_path / name).stat().st_size for name in (TOKENS, BAD_RECORDS)} == {
            TOKENS: 160_000,
            BAD_RECORDS: 4040,
        }
        TokenStore.open(tmp_path).verify()


def test_a_file_that_is_shorter_on_the_disk_is_not_committed(data, monkeypatch):
    def write_nothing(path, content):
        path.touch()
        return FileEntry(bytes=len(content), sha256="")

    monkeypatch.setattr("torchtrain.data.writer.write_file", write_nothing)
    with pytest.raises(UserError, match=r"cannot be written: 0 bytes are on the disk and .* were written"):
        prepare(data, word_tokenizer())
    assert os.listdir(f"{data.cache}/corpus") in ([], [f".{fingerprint(data, word_tokenizer())}.lock"])
