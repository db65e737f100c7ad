"""The store's bytes: what is written is checked, what has changed is found."""

import hashlib
import json
import multiprocessing
import os
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anchorline.errors import UserError
from anchorline.files import FileEntry, entry_of
from torchtrain.config import DataConfig, Source
from torchtrain.data import TokenStore, fingerprint, prepare
from torchtrain.data.store import BAD_RECORDS, DOMAINS, HASHES, HEADER, OFFSETS, REPEATS
from torchtrain.data.writer import StoreWriter
from torchtrain.tests.data_fixtures import word_tokenizer, write_jsonl
from torchtrain.tests.runs import TIME_LIMIT
from torchtrain.tests.tiny import refused

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


def set_to(place, value):
    def change(array):
        array = array.copy()
        array[place] = value
        return array

    return change


SHARD = {"file": TOKENS, "documents": 300, "tokens": 1200}
LIES = [
    *((OFFSETS, set_to(place, value)) for place, value in ((3, 0), (0, 1), (1, -5), (1, 0), (-1, 10**9), (-1, 2**62))),
    *((OFFSETS, change) for change in (np.float64, np.int32, lambda x: x[None], lambda x: x[:-1], lambda x: x[:0])),
    *((DOMAINS, change) for change in (lambda x: x + 99, lambda x: x - 1, lambda x: x[:3], np.str_, np.int64)),
    *((HASHES, change) for change in (lambda x: x[:3], np.float64)),
    (REPEATS, lambda x: np.ones(300, np.uint16)),  # without a mixture
    ("extra.npy", lambda x: np.ones(3)),
    *(("token_bytes", value) for value in (3, 4, -2, 0)),
    *(("largest_token", value) for value in (-2, 2**31)),
    *(("domains", value) for value in ([], ["a", "a"])),
    *(("files", value) for value in ({}, {"../../x": {"bytes": 0, "sha256": ""}})),
    *(("shards", value) for value in ([], [SHARD, SHARD], [SHARD | {"file": "../x"}], [SHARD | {"file": BAD_RECORDS}])),
    *(("shards", [SHARD | change]) for change in ({"tokens": 5}, {"documents": 5}, {"documents": -300})),
    ("has_targets", True),
    ("duplicates_removed", True),
]


@pytest.mark.parametrize("number", range(len(LIES)))
def test_a_store_whose_digests_fit_and_whose_numbers_do_not_is_refused_on_opening(data, number):
    what, change = LIES[number]
    folder = prepare(data, word_tokenizer()).folder
    content = json.loads((folder / HEADER).read_bytes())
    assert content["shards"] == [SHARD]
    del content["digest"]
    if callable(change):
        held = np.load(folder / what) if (folder / what).exists() else np.zeros(0)
        np.save(folder / what, change(held))
        content["files"][what] = entry_of(folder / what).model_dump()
    else:
        content[what] = change
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / HEADER).write_text(json.dumps(content | {"digest": digest}))
    assert re.search(rf"token store '?{folder}'? is damaged \(.*; if it lies", refused(lambda: TokenStore.open(folder)))


def test_a_largest_token_that_is_not_is_found_when_all_is_read(data):
    folder = prepare(data, word_tokenizer()).folder
    content = json.loads((folder / HEADER).read_bytes()) | {"largest_token": 4}
    del content["digest"]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / HEADER).write_text(json.dumps(content | {"digest": digest}))
    assert "largest_token is not 4" in refused(TokenStore.open(folder).verify)


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
    process.join(TIME_LIMIT)
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
