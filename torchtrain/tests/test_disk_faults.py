"""Faults of the disk: full, read-only, without locks."""

import errno
import fcntl
import os
import stat
import tempfile
from pathlib import Path

import pytest

from anchorline import files
from anchorline.errors import UserError
from torchtrain.checkpoint.manifest import MANIFEST, Manifest
from torchtrain.checkpoint.store import Checkpoints
from torchtrain.run.lock import hold, is_held
from torchtrain.tests.checkpoint_fixtures import make_strategy, save
from torchtrain.tests.runs import unprivileged
from torchtrain.training.events import MetricsFile, read_metrics


def test_a_full_disk(checkpoints, monkeypatch):
    """The kernel's own ENOSPC, at every file in turn: each is opened as /dev/full."""
    strategy = make_strategy(updates=1)
    save(checkpoints, 1, strategy)
    names = [*Manifest.read(checkpoints.path(1)).files, MANIFEST]
    real = os.open
    for name in names:

        def open_full(path, flags, mode=0o777, *, dir_fd=None, full=name):
            writes_it = Path(path).name == full and flags & os.O_WRONLY
            return real("/dev/full", os.O_WRONLY) if writes_it else real(path, flags, mode, dir_fd=dir_fd)

        monkeypatch.setattr(files.os, "open", open_full)
        with pytest.raises(UserError) as caught:
            save(checkpoints, 2, strategy)
        assert f"the checkpoint could not be written: {os.strerror(errno.ENOSPC).lower()}" in str(caught.value)
        assert "the last good one is that of step 1; mend that, then: torchtrain resume" in str(caught.value)
        assert [path.name for path in checkpoints.folder.iterdir()] == ["step-00000001"]
    monkeypatch.undo()
    save(checkpoints, 2, strategy)
    assert checkpoints.steps() == [1, 2]


def test_a_read_only_folder():
    strategy = make_strategy(updates=1)
    with tempfile.TemporaryDirectory() as name:
        checkpoints = Checkpoints(Path(name) / "run" / "checkpoints")
        save(checkpoints, 1, strategy)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        with unprivileged(), pytest.raises(UserError) as caught:
            save(checkpoints, 2, strategy)
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert "permission denied (" in str(caught.value)
    assert "step-00000002.partial); the last good one is that of step 1" in str(caught.value)


def test_a_lock_is_asked_for_as_a_networks_disk_gives_it(tmp_path, monkeypatch):
    """NFS makes a lock of a range of bytes of it: to hold one alone takes a file that is open for writing."""
    record = tmp_path / ".lock"
    record.touch()
    real = fcntl.flock

    def nfs(handle, kind):
        mode = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE
        if (kind & fcntl.LOCK_EX and mode == os.O_RDONLY) or (kind & fcntl.LOCK_SH and mode == os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(handle, kind)

    monkeypatch.setattr(fcntl, "flock", nfs)
    assert not is_held(record)
    with hold(record):
        assert is_held(record)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK])
def test_a_disk_without_locks_is_one_line(tmp_path, monkeypatch, code):
    record = tmp_path / ".lock"
    record.touch()

    def none(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    told = f"run.folder {tmp_path}: its disk has no locks \\({os.strerror(code).lower()}\\); mount it with them"
    with pytest.raises(UserError, match=told):
        is_held(record)
    with pytest.raises(UserError, match=told), hold(record):
        pass


def test_a_line_that_was_cut_off_goes_and_one_that_does_not_fit_is_told(tmp_path):
    path = tmp_path / "timing.jsonl"
    path.write_text('{"event": "save", "step": 1}\n{"ev')
    with MetricsFile(path) as file:
        file.write("save", {"step": 2})
        assert [event["step"] for event in read_metrics(path)] == [1, 2]
        with open("/dev/full", "ab", buffering=0) as full:
            file._file, whole = full, file._file
            with pytest.raises(
                UserError, match=rf"{path}: could not be written: no space left on device; .* {tmp_path}"
            ):
                file.write("save", {"step": 3})
            file._file = whole
