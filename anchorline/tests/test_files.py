"""Reading a user's files: whole or refused, never for ever; commits that a crash leaves whole."""

import json
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from anchorline import files
from anchorline.errors import UserError
from anchorline.files import (
    build_folder,
    commit,
    read_file,
    read_json,
    remove,
    replace_file,
    save,
    set_aside,
    write_file,
)


def test_a_file_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_BLOCK", 100)  # a system may give less than it is asked for
    (tmp_path / "a").write_bytes(bytes(range(256)) * 10)
    assert read_file(tmp_path / "a", 2560) == bytes(range(256)) * 10
    with pytest.raises(OSError, match="longer than 2,559 bytes"):
        read_file(tmp_path / "a", 2559)
    if Path("/proc/self/maps").exists():  # its size is 0, and one read gives a page
        assert read_file(Path("/proc/self/maps"), 1 << 24).endswith(b"\n")


def test_nothing_is_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        refused = []

        def read(path: Path) -> None:
            with pytest.raises(OSError) as error:  # noqa: PT011 - what the system says of each
                read_file(path, 100)
            refused.append(error.value.filename)

        for path in (tmp_path / "pipe", tmp_path / "s", tmp_path, Path("/dev/zero"), tmp_path / "none"):
            thread = threading.Thread(target=read, args=(path,), daemon=True)
            thread.start()
            thread.join(300)
            assert refused
            assert refused.pop() == str(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "holds no values by name, but a list"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": ' + b"1" * 5_000 + b"}", "is not JSON"),
        (b"\xff", "is not JSON"),
    ],
)
def test_json_that_is_none(tmp_path, content, message):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message) as refused:
        read_json(tmp_path / "a.json", "what")
    assert str(refused.value).startswith("what: ")
    assert "a.json" in str(refused.value)


def test_json_and_the_folder_of_a_user_who_is_not_here(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"a": [1, "é"]}))
    assert read_json(tmp_path / "a.json", "what") == {"a": [1, "é"]}
    with pytest.raises(UserError, match=r"what: .*none: no such file or directory"):
        read_json(tmp_path / "none", "what")
    with pytest.raises(UserError, match="~ names the folder of a user who is not here"):
        files.expand("~nobody-at-all/a")


@pytest.mark.parametrize("write", [replace_file, save])
def test_an_interruption_leaves_the_old_file(tmp_path, monkeypatch, write):
    file = tmp_path / "report.html"
    file.write_bytes(b"old")
    with monkeypatch.context() as patched:
        patched.setattr(files.os, "fsync", lambda handle: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(file, b"new, and not yet on the disk")
        assert file.read_bytes() == b"old"
    write(file, b"new")
    assert file.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [file]


def test_saving_to_a_link_a_pipe_and_nowhere(tmp_path):
    (tmp_path / "link").symlink_to("file")
    for content in (b"made", b"made anew"):
        save(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == content
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    save(tmp_path / "pipe", b"written into")
    assert os.read(reader, 100) == b"written into"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    for path in (tmp_path, tmp_path / "none" / "file"):
        with pytest.raises(OSError) as error:  # noqa: PT011 - what the system says of each
            save(path, b"")
        assert error.value.filename == str(path)
    assert {path.name for path in tmp_path.iterdir()} == {"link", "file", "pipe"}


def test_writing_and_committing(tmp_path):
    entry = write_file(tmp_path / "a", b"content")
    assert files.entry_of(tmp_path / "a") == entry
    assert files.entry_of(tmp_path / "a", 3).bytes == 3
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "a", b"other")
    replace_file(tmp_path / "a", b"other")
    assert (tmp_path / "a").read_bytes() == b"other"
    partial = tmp_path / "folder.partial"
    partial.mkdir()
    (partial / "x").write_text("1")
    commit(partial, tmp_path / "folder")
    assert (tmp_path / "folder" / "x").read_text() == "1"
    (tmp_path / "other.partial").mkdir()
    with pytest.raises(OSError, match="not empty"):  # a commit removes nothing
        commit(tmp_path / "other.partial", tmp_path / "folder")
    aside = set_aside(tmp_path / "folder")
    (aside / "the user's").touch()
    assert not remove(aside, ["x"])
    assert [path.name for path in aside.iterdir()] == ["the user's"]
    assert remove(aside, ["the user's"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "other.partial"]


def test_a_folder_is_built_whole_or_not_at_all_in_the_mode_of_this_process(tmp_path):
    before = os.umask(0o077)
    try:
        with build_folder(tmp_path / "built") as partial:
            partial.mkdir()
            (partial / "a").write_text("a")
            (partial / "a").chmod(0o644)  # as a library may
            assert not (tmp_path / "built").exists()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "built", tmp_path / "built" / "a")] == [0o700, 0o600]
    with suppress(ZeroDivisionError), build_folder(tmp_path / "failed") as partial:
        partial.mkdir()
        raise ZeroDivisionError
    with pytest.raises(OSError, match="not empty"), build_folder(tmp_path / "built") as partial:
        partial.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["built"]
