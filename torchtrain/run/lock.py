"""A lock on a run's folder: one process at a time writes it. The system drops the lock when its holder ends."""

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
def hold(lock: Path) -> Iterator[None]:
    """Hold a run by a lock on this file, made if it is missing. Raises UserError: another process has it; no locks."""
    try:  # open for writing, because NFS gives the lock to nobody else
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
    except OSError as error:
        raise UserError(f"run.folder {lock.parent}: cannot be written: {disk_fault(error)}") from None
    try:
        for attempt in range(_ATTEMPTS):  # `is_held` takes the lock for an instant
            if _try(lock, handle):
                break
            time.sleep(_SECONDS_BETWEEN if attempt + 1 < _ATTEMPTS else 0)
        else:
            raise UserError(at_work(lock.parent))
        if not os.path.lexists(lock) or not os.path.samestat(os.stat(lock), os.fstat(handle)):
            raise UserError(at_work(lock.parent))  # which has just replaced the folder
        yield
    finally:
        os.close(handle)


def is_held(lock: Path) -> bool:
    """Whether a process is at work on a run. Raises UserError: its disk has no locks."""
    if not lock.exists():
        return False
    with open_file(lock) as file:
        return not _try(lock, file.fileno(), shared=True)


def at_work(folder: Path) -> str:
    """Return, in words, that a run is held."""
    return f"run.folder {folder}: another process is at work in it; stop that, or choose another folder"


def _try(lock: Path, handle: int, shared: bool = False) -> bool:
    if fcntl is None:
        raise UserError(f"run.folder {lock.parent}: this system has no file locks; on Windows, use WSL")
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise UserError(
            f"run.folder {lock.parent}: its disk has no locks ({disk_fault(error)}); mount it with them "
            "(Lustre: -o flock; NFS: with its lock service), or choose another disk"
        ) from None
    return True
