"""One process at a time writes a run's folder. The system drops the lock when its holder ends, however it ends."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anchorline.errors import UserError, disk_fault
from anchorline.files import open_file

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_ATTEMPTS, _SECONDS_BETWEEN = 5, 0.2


@contextmanager
def hold(record: Path) -> Iterator[None]:
    """Hold a run for as long as the block lasts.

    Args:
        record: `run.json`, which is written once and never replaced.

    Raises:
        UserError: another process holds it, or has removed the run; it cannot be written; or its disk has no locks.
    """
    try:
        handle = os.open(
            record, os.O_RDWR | os.O_NONBLOCK
        )  # nothing is written, but NFS gives this lock only to who may
    except OSError as error:
        raise UserError(f"run.folder {record.parent}: cannot be written: {disk_fault(error)}") from None
    try:
        take(record, handle)
        yield
    finally:
        os.close(handle)


@contextmanager
def claim(path: Path) -> Iterator[int]:
    """Make a file and hold it, from before anyone can see it as a run's record and on, whatever its name becomes.

    One that a process left which has ended is taken over. The file is removed if the block fails while it has its name.

    Args:
        path: the file; its folder is there.

    Yields:
        The empty file, open.

    Raises:
        UserError: another process holds it, or its disk has no locks.
        OSError: it cannot be made.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags, 0o666)
    try:
        take(path, handle)
        os.ftruncate(handle, 0)
        try:
            yield handle
        except BaseException:
            if _same(path, handle):
                path.unlink()
            raise
    finally:
        os.close(handle)


def take(path: Path, handle: int) -> None:
    """Take the lock of an open file, and see that the file still has its name.

    Raises:
        UserError: another process holds it or has removed it; or its disk has no locks.
    """
    for attempt in range(_ATTEMPTS):
        if _try(path, handle):
            if _same(path, handle):
                return
            break
        if attempt + 1 < _ATTEMPTS:
            time.sleep(_SECONDS_BETWEEN)
    raise UserError(at_work(path))


def _same(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except FileNotFoundError:
        return False


def is_held(record: Path) -> bool:
    """Whether a process is at work on a run. Looking takes a shared lock for an instant, which `hold` waits out.

    Raises:
        UserError: its disk has no locks.
    """
    with open_file(record) as file:
        return not _try(record, file.fileno(), shared=True)


def at_work(record: Path) -> str:
    """Return, in words, that a run is held."""
    return f"run.folder {record.parent}: another process is at work in it; stop that, or choose another folder"


def _try(record: Path, handle: int, shared: bool = False) -> bool:
    if fcntl is None:
        raise UserError(f"run.folder {record.parent}: this system has no file locks; on Windows, use WSL")
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"run.folder {record.parent}: its disk gives no locks ({disk_fault(error)}); mount it with them "
            "(Lustre: -o flock; NFS: with its lock service), or choose another disk"
        ) from None
    return True
